"""Reads the memory counters of torch's caching allocator. They are on the host: reading waits for nothing and
starts no context."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perfagent.device.backends import accelerator

__all__ = ["allocator", "chosen_device", "device_in_use", "measured"]

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
    """Returns the `cuda/*` values of a device by its index, whatever its kind; empty if this process never used one, and
    for another library's allocator (RMM), which keeps no counters.

    free_bytes: device memory that nobody uses, if known. The headroom is at most what
    `torch.cuda.set_per_process_memory_fraction` leaves this process.
    """
    backend = accelerator()
    if not backend.in_use():
        return {}
    values = measured(backend.memory_stats(device), free_bytes)
    if "cuda/headroom_bytes" in values:
        share, total = backend.ask("get_per_process_memory_fraction", device), backend.property(device, "total_memory")
        if share is not None and share < 1.0 and total:
            left = max(0.0, share * total - values["cuda/allocated_bytes"])
            values["cuda/headroom_bytes"] = min(values["cuda/headroom_bytes"], left)
    return values


def device_in_use() -> int | None:
    """Returns the index of the device on which this process has reserved most; None while it has none. (Each thread has
    its own current device.)"""
    backend = accelerator()
    if not backend.in_use():
        return None
    devices = range(backend.count())
    reserved = [measured(backend.memory_stats(device)).get("cuda/reserved_bytes", 0.0) for device in devices]
    most = max(reserved, default=0.0)
    return reserved.index(most) if most else None


def chosen_device(*, first: bool) -> int | None:
    """Returns the index of the device that the calling thread has made its current one; None if it has not, or may not
    have. first: it is the first of several ranks here, each of which chooses a device."""
    backend = accelerator()
    if not backend.in_use():
        return None
    device = backend.current_index()
    return device if device or first or backend.count() == 1 else None


def measured(stats: Mapping[str, Any], free_bytes: float | None = None) -> dict[str, float]:
    """Converts an allocator's statistics (torch.cuda.memory_stats_as_nested_dict) to names and values; leaves
    out missing ones.

    cuda/fragmentation: share of the reserved memory that no live tensor uses. cuda/headroom_bytes: what tensors could
    still use: free device memory, and what the allocator holds in reserve, fragments included.
    """
    found = {name: stats.get(key, {}).get("all", {}).get(which) for name, key, which in _SIZES}
    found |= {name: stats.get(key) for name, key in _COUNTS}
    values = {name: float(value) for name, value in found.items() if value is not None}
    allocated, reserved = values.get("cuda/allocated_bytes"), values.get("cuda/reserved_bytes")
    if allocated is not None and reserved:
        values["cuda/fragmentation"] = max(0.0, 1.0 - allocated / reserved)
        if free_bytes is not None:
            values["cuda/headroom_bytes"] = free_bytes + max(0.0, reserved - allocated)
    return values
