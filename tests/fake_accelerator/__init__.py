"""An accelerator that is none, for tests without a GPU: `fakegpu`, by torch's PrivateUse1 interfaces.

Two devices, whose memory is the host's and whose operators are the CPU's, so that a training has the CPU's numbers. What a
GPU does late, a test decides: see control.py. A test that takes the fixture `fakegpu` runs in a fork of its own
(forked_tests.py), because torch keeps a backend, and the threads that autograd has for its devices, for ever. Scripts
call `load()`.

| what | how far |
|---|---|
| numbers | the CPU's bit for bit, random ones too: the same kernels. Attention takes another kernel than on the CPU |
| autocast, GradScaler | linear layers, matrix products and 2-D convolutions in half precision; the CPU has a longer list |
| DDP | by `fakeccl`: gloo reduces copies in host memory, each collective at once |
| FSDP, DataParallel | no: collectives that `fakeccl` has not; a torch that was built for CUDA |
| graphs | `torch.accelerator.Graph`, one at a time, with the errors of CUDA's capture modes. A replay draws new random numbers |
| torch.compile | with the backends `eager` and `aot_eager`; inductor does not know the device |
| LSTM, GRU | no: torch asks for fused cells, which the CPU has not. Nor are there sparse or quantized tensors |
| memory | in blocks of 512 bytes and segments of 2 MiB, without fragments, snapshots, or what a kernel needs as it runs |
| kernels | run at once, on the thread that calls them; late are their events, and copies to the host |
"""

from __future__ import annotations

import functools

from fake_accelerator.building import NAME, Missing, library
from fake_accelerator.control import Control, Counts

__all__ = ["NAME", "Control", "Counts", "Missing", "library", "load"]


@functools.cache
def load() -> Control:
    """Gives this process the devices, for good. Raises Missing where they cannot be had."""
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
