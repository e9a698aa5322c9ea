"""Records the operators of one step, whose floating-point operations `probes/flops/` counts. On the training thread."""
