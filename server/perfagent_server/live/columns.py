"""Columns of a frame as arrays, and arrays as lists for JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from perfagent.wire import Group, plain

__all__ = ["Floats", "Ints", "column", "numbers", "steps_and_times"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def steps_and_times(group: Group) -> tuple[Ints, Floats]:
    return np.frombuffer(group.step, "<i8"), np.frombuffer(group.time, "<f8")


def column(group: Group, name: str) -> Floats:
    raw = group.values[name]
    return np.frombuffer(raw, "<f8" if len(raw) == 8 * group.rows else "<f4").astype(np.float64)


def numbers(values: Floats) -> list[Any]:
    """A list for JSON. Checked as a whole first: nearly always every value is finite."""
    listed: list[Any] = values.tolist()
    return listed if bool(np.isfinite(values).all()) else [plain(value) for value in listed]
