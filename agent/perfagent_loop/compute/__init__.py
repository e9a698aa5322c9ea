"""What a step computes with: attention, recomputed activations, compiled code, cuDNN's search, NCCL's settings."""
