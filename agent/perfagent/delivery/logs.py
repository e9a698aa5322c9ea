"""What a user logs, packed while it is being looked at anyway.

A log() call is a dict with a dozen numbers, each an object of its own that the training's core has just written. As one row of a
flat array it is written to the disk by a copy, and becomes columns a second later by slices: no number is looked at twice. Only
calls with numbers of Python's own are packed; the others stay as they are, to be checked one by one (columns.py).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from perfagent.hooks.alike import Block

__all__ = ["Logs", "Packed", "rows_in", "unpacked"]


class Packed(NamedTuple):
    """Calls with the same names. values: row by row, float64; steps: int64; times and monotonics: float64, seconds."""

    names: tuple[Any, ...]
    rows: int
    steps: bytes
    times: bytes
    monotonics: bytes
    values: bytes


class _Shape:
    __slots__ = ("monotonics", "steps", "times", "values")

    def __init__(self) -> None:
        self.steps = array("q")
        self.times, self.monotonics, self.values = array("d"), array("d"), array("d")

    def cut(self, rows: int, names: int) -> None:
        """Back to so many rows, wherever the next one failed."""
        del self.steps[rows:], self.times[rows:], self.monotonics[rows:], self.values[rows * names :]


class Logs:
    """The calls of one tick."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[Any, ...], _Shape] = {}

    def add(self, row: tuple[int, float, float, dict[Any, Any]]) -> bool:
        """False where a call cannot be packed: it holds nothing, or a whole number beyond what an array takes."""
        step, time, monotonic, metrics = row
        if not metrics:
            return False
        names = tuple(metrics)
        try:
            shape = self._shapes.get(names)
            if shape is None:
                shape = self._shapes[names] = _Shape()
        except Exception:  # noqa: BLE001 - somebody's own keys, which may raise what they like when they are compared
            return False
        rows = len(shape.times)
        try:
            shape.values.extend(metrics.values())
            shape.steps.append(step)
            shape.monotonics.append(monotonic)
            shape.times.append(time)
        except (OverflowError, TypeError):
            shape.cut(rows, len(names))
            return False
        return True

    def packed(self) -> Iterator[Packed]:
        for names, shape in self._shapes.items():
            if shape.times:
                parts = (part.tobytes() for part in (shape.steps, shape.times, shape.monotonics, shape.values))
                yield Packed(names, len(shape.times), *parts)


def unpacked(parts: Sequence[Packed]) -> Block:
    """The columns of calls that all have the same names."""
    names = parts[0].names
    values = array("d", b"".join([part.values for part in parts]))
    width = len(names)
    return Block(
        names,
        array("q", b"".join([part.steps for part in parts])),
        array("d", b"".join([part.times for part in parts])),
        array("d", b"".join([part.monotonics for part in parts])),
        [values[place::width] for place in range(width)],
    )


def rows_in(block: Block) -> Iterator[tuple[int, float, float, dict[Any, float]]]:
    """The calls one by one."""
    for step, time, monotonic, *values in zip(block.steps, block.times, block.monotonics, *block.columns, strict=True):
        yield step, time, monotonic, dict(zip(block.names, values, strict=True))
