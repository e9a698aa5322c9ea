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

    free_bytes: memory of the device that nobody uses, where it is known.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return measured(torch.cuda.memory_stats_as_nested_dict(device), free_bytes)


def measured(stats: Mapping[str, Any], free_bytes: float | None = None) -> dict[str, float]:
    """Names and values of an allocator's statistics, as torch.cuda.memory_stats_as_nested_dict gives them; what is not among
    them is left out.

    cuda/fragmentation: share of the reserved memory that no live tensor uses. cuda/headroom_bytes: what tensors could still take:
    memory of the device that nobody uses, and what the allocator holds in reserve (as far as it is not in splinters).
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
