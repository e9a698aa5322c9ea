"""An accelerator that is none, for tests without a GPU: `fakegpu`, by torch's PrivateUse1 interfaces.

Two devices, whose memory is the host's and whose operators are the CPU's, so that a training has the CPU's numbers. What a
GPU does late, a test decides: see control.py. A test that takes the fixture `fakegpu` runs in a fork of its own
(forked_tests.py), because torch keeps a backend, and the threads that autograd has for its devices, for ever. Scripts
call `load()`.
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
