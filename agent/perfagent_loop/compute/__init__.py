"""What a step computes with: attention kernels, recomputed activations, compiled code, cuDNN's search, NCCL's settings.

Each module is usable alone; the public names (`perfagent.best_attention`, `perfagent.checkpoint_activations`, ...) are
resolved by the package's lazy table.
"""
