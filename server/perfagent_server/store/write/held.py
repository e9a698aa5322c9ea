"""Notes which hardware a process had, for how long, and how much energy it took: what its run cost is computed from that.

It stands in the row of the process, since samples may be thinned, and those of steps that a later attempt did again are
out of sight.
"""

from __future__ import annotations

import math
import struct
from typing import Any

from perfagent.wire import Frame, Group

__all__ = ["HELD", "note_held"]

HELD = ("worked_until", "gpus", "cpu_cores", "gpu_energy_j", "gpu_energy_per_step_j")
_OF_A_GPU = ("gpu/memory_used_bytes", "cuda/allocated_bytes")


def note_held(source: dict[str, Any], frame: Frame, newest: float) -> None:
    """newest: the latest time in the frame, by our clock."""
    if source["ended"] is None:  # what comes later, such as a result of a test, was not worked for here
        source["worked_until"] = max(source["worked_until"] or 0.0, newest, source["started"])
    for group in frame.groups:
        if not source["gpus"] and any(name in group.values for name in _OF_A_GPU):
            source["gpus"] = 1
        for name, column in (("host/cores", "cpu_cores"), ("gpu/energy_per_step_j", "gpu_energy_per_step_j")):
            source[column] = _last(group, name, source[column])
        # it only grows, and frames may come in any order
        energy = _last(group, "gpu/energy_j", None)
        if energy is not None:
            source["gpu_energy_j"] = max(source["gpu_energy_j"] or 0.0, energy)


def _last(group: Group, name: str, otherwise: float | None) -> float | None:
    """The last value of a group's column, where it is there and can be right."""
    column = group.values.get(name)
    if not column:
        return otherwise
    size = len(column) // group.rows
    value = float(struct.unpack_from("<d" if size == 8 else "<f", column, len(column) - size)[0])
    return value if math.isfinite(value) and value >= 0 else otherwise
