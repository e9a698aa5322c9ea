"""Reads the memory counters of torch's caching allocator. They are on the host: reading waits for nothing and
starts no context.

The counters are read as torch's C++ side has them (`memory_stats` would flatten and sort a hundred names each time).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["allocator", "device_in_use", "measured"]

_SIZES = (
    ("cuda/allocated_bytes", "allocated_bytes", "current"),
    ("cuda/reserved_bytes", "reserved_bytes", "current"),
    ("cuda/active_bytes", "active_bytes", "current"),
    ("cuda/inactive_split_bytes", "inactive_split_bytes", "current"),
    ("cuda/peak_allocated_bytes", "allocated_bytes", "peak"),
    ("cuda/peak_reserved_bytes", "reserved_bytes", "peak"),
)
_COUNTS = (("cuda/alloc_retries", "num_alloc_retries"), ("cuda/ooms", "num_ooms"))


def allocator(device: int, *, free_bytes: float | None = None) -> dict[str, float]:
    """Returns the `cuda/*` values of a device by its ordinal; empty if this process never used CUDA, and
    for other devices.

    free_bytes: device memory that nobody uses, if known. The headroom is at most what
    `torch.cuda.set_per_process_memory_fraction` leaves this process.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    try:
        values = measured(torch.cuda.memory_stats_as_nested_dict(device), free_bytes)
        if "cuda/headroom_bytes" in values and (share := torch.cuda.get_per_process_memory_fraction(device)) < 1.0:
            allowed = share * torch.cuda.get_device_properties(device).total_memory
            left = max(0.0, allowed - values["cuda/allocated_bytes"])
            values["cuda/headroom_bytes"] = min(values["cuda/headroom_bytes"], left)
        return values
    except RuntimeError:  # another library's allocator (RMM) keeps no counters
        return {}


def device_in_use() -> int | None:
    """Returns the ordinal of the CUDA device on which this process has reserved most; None while it has none. (The
    current device is a matter of each thread, so it cannot be asked for on the sender's.)"""
    torch: Any = sys.modules.get("torch")
    cuda: Any = getattr(torch, "cuda", None)
    if not hasattr(cuda, "is_initialized") or not cuda.is_initialized():  # torch's own import may be under way
        return None
    try:
        reserved = [
            measured(cuda.memory_stats_as_nested_dict(device)).get("cuda/reserved_bytes", 0.0)
            for device in range(cuda.device_count())
        ]
    except RuntimeError:  # as in `allocator`
        return None
    most = max(reserved, default=0.0)
    return reserved.index(most) if most else None


def measured(stats: Mapping[str, Any], free_bytes: float | None = None) -> dict[str, float]:
    """Converts an allocator's statistics (torch.cuda.memory_stats_as_nested_dict) to names and values; leaves
    out missing ones.

    cuda/fragmentation: share of the reserved memory that no live tensor uses. cuda/headroom_bytes: what tensors could
    still use: free device memory, and what the allocator holds in reserve, fragments included.
    """
    values: dict[str, float] = {}
    for name, key, which in _SIZES:
        size = stats.get(key, {}).get("all", {}).get(which)
        if size is not None:
            values[name] = float(size)
    for name, key in _COUNTS:
        if key in stats:
            values[name] = float(stats[key])
    allocated, reserved = values.get("cuda/allocated_bytes"), values.get("cuda/reserved_bytes")
    if allocated is not None and reserved:
        values["cuda/fragmentation"] = max(0.0, 1.0 - allocated / reserved)
        if free_bytes is not None:
            values["cuda/headroom_bytes"] = free_bytes + max(0.0, reserved - allocated)
    return values
