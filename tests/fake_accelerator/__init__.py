"""An accelerator that is none, for tests without a GPU: `fakegpu`, by torch's PrivateUse1 interfaces.

Two devices, whose memory is the host's and whose operators are the CPU's, so that a training has the CPU's numbers. What a
GPU does late, a test decides: see control.py. A test that takes the fixture `fakegpu` runs in a fork of its own
(forked_tests.py), because torch keeps a backend, and the threads that autograd has for its devices, for ever. Scripts
call `load()`.

| what | on the fake devices |
|---|---|
| losses, gradients, weights | bit for bit the CPU's: the same kernels and random numbers. Not where torch itself takes another way on the CPU: attention without a fused kernel, and autocast, whose list of operators is shorter here |
| autocast, GradScaler | float16 and bfloat16 for linear layers, matrix products and 2-D convolutions |
| DDP | over the backend `fakeccl`, which has gloo reduce copies in host memory, each collective at once. FSDP needs more of its collectives than there are; DataParallel needs a torch built for CUDA |
| graphs | `torch.accelerator.Graph`, one at a time, not on the default stream. Errors as in CUDA's global, thread-local and relaxed modes. What a captured kernel wrote is put back at the end, and a replay runs the kernels again, random numbers drawn anew |
| torch.compile | the backends `eager` and `aot_eager`; inductor does not know the device |
| LSTM, GRU | not there: torch asks every PrivateUse1 device for fused cells, which the CPU has none of. Nor are sparse and quantized tensors |
| memory | counted in blocks of 512 bytes and segments of 2 MiB that are kept; no fragments, no snapshot, no record of allocations, and what a kernel needs while it runs is not counted |
| kernels | run when they are called, on the thread that calls them; only their events, and copies to the host, can be late |
"""

from __future__ import annotations

import functools

from fake_accelerator.building import NAME, Missing, library
from fake_accelerator.control import Control, Counts

__all__ = ["NAME", "Control", "Counts", "Missing", "library", "load"]


@functools.cache
def load() -> Control:
    """Gives this process the devices, before its first backward pass. Raises Missing where they cannot be had."""
    compiled = library()
    import torch

    # torch's own threads do not survive the fork of a process that has used them
    torch.set_num_threads(1)
    torch.ops.load_library(str(compiled))
    torch.utils.rename_privateuse1_backend(NAME)
    from fake_accelerator import device_module, process_group

    torch._register_device_module(NAME, device_module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    process_group.register()
    return Control(compiled)
