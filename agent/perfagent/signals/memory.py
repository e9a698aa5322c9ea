"""Memory of torch's caching allocator. Host-side counters only: reading them waits for nothing and starts no context."""

from __future__ import annotations

import sys

__all__ = ["NAMES", "allocator"]

NAMES = (
    "cuda/allocated_bytes",
    "cuda/reserved_bytes",
    "cuda/peak_allocated_bytes",
    "cuda/alloc_retries",
    "cuda/ooms",
)
_KEYS = ("allocated_bytes.all.current", "reserved_bytes.all.current", "allocated_bytes.all.peak", "num_alloc_retries", "num_ooms")


def allocator(device: int) -> tuple[float, ...] | None:
    """Values of NAMES for a device; None where CUDA was never used in this process."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    stats = torch.cuda.memory_stats(device)
    return tuple(float(stats.get(key, 0)) for key in _KEYS)
