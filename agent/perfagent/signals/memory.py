"""Memory of torch's caching allocator. Host-side counters only: reading them waits for nothing and starts no context.

The counters come as torch's C++ side has them (`memory_stats` would flatten and sort a hundred names each time).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

__all__ = ["allocator", "measured"]

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
    """`cuda/*` values of a device by its ordinal; empty where CUDA was never used in this process, and on other devices.

    free_bytes: memory of the device that nobody uses, where it is known. The headroom is not more than what
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
    except RuntimeError:  # an allocator of another library in its place (RMM) counts nothing
        return {}


def measured(stats: Mapping[str, Any], free_bytes: float | None = None) -> dict[str, float]:
    """Names and values of an allocator's statistics, as torch.cuda.memory_stats_as_nested_dict gives them; what is not among
    them is left out.

    cuda/fragmentation: share of the reserved memory that no live tensor uses. cuda/headroom_bytes: what tensors could still take:
    memory of the device that nobody uses, and what the allocator holds in reserve, splinters too.
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
