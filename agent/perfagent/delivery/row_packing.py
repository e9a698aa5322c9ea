"""Packs rows of numbers under names into bytes at the tick that collects them: the form that all rows but usual steps have
on their way to a frame.

A row is one struct: the step, the Unix time, the monotonic time, and a float64 for each name. The spool stores these
bytes unchanged. A frame needs columns: a column is every n-th word of the joined rows. So no value becomes a Python
object again, and no objects are left to the garbage collector, which would run in the training loop.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Callable, Collection, Iterable
from struct import Struct
from typing import NamedTuple

from perfagent.delivery.columns import Columns, Row
from perfagent.wire import Group

__all__ = ["Packed", "Packer", "grouped", "is_finite", "merge", "rows_in"]

_FIXED = 3
"""Words before the values: step, Unix time, monotonic."""
_MOST_SHAPES = 32
"""Layouts whose names are cached between ticks."""
_FLOAT, _DOUBLE = Struct("<f"), Struct("<d")


class Packed(NamedTuple):
    """Rows of one shape, one after the other."""

    names: tuple[str, ...]
    data: bytes

    @property
    def rows(self) -> int:
        return len(self.data) // (8 * (_FIXED + len(self.names)))


class Packer:
    """Packs the rows of one tick, by their names. meets: is called with names that it has not met yet."""

    def __init__(self, columns: Columns, meets: Callable[[tuple[str, ...]], None] | None = None) -> None:
        self._columns, self._meets = columns, meets
        self._shapes: dict[tuple[str, ...], list[bytes]] = {}
        self._names: tuple[str, ...] | None = None
        self._pack: Callable[..., bytes] = _layout(0).pack
        self._parts: list[bytes] = []

    def add(self, step: int, time: float, monotonic: float, names: tuple[str, ...], values: Collection[object]) -> None:
        """Packs what may be stored of a row; the rest is counted in the columns. A hostile object among the names may raise
        anything."""
        try:
            if names == self._names or self._turn_to(names):
                self._parts.append(self._pack(step, time, monotonic, *values))
                return
        except Exception:  # noqa: BLE001, S110 - struct.error of what is no number or too large; what an object of the user's raises
            pass
        checked = self._columns.checked((step, time, monotonic, dict(zip(names, values, strict=False))))
        if checked is not None and self._turn_to((*checked[3],)):
            self._parts.append(self._pack(*checked[:3], *checked[3].values()))

    def _turn_to(self, names: tuple[str, ...]) -> bool:
        """False if not all names may be stored."""
        if not names or not self._columns.knows(names):
            return False
        if self._meets is not None and names not in self._shapes:
            self._meets(names)
        self._pack, self._parts = _layout(len(names)).pack, self._shapes.setdefault(names, [])
        self._names = names
        return True

    def take(self) -> list[Packed]:
        """What was packed since the last time. The names stay, since those of the next tick will be the same."""
        taken = [Packed(names, b"".join(parts)) for names, parts in self._shapes.items() if parts]
        for parts in self._shapes.values():
            parts.clear()
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()
            self._names = None
        return taken


def grouped(blocks: Iterable[Packed]) -> list[Group]:
    """The columns of packed rows, one group for each shape."""
    shapes: dict[tuple[str, ...], list[bytes]] = {}
    for names, data in blocks:
        shapes.setdefault(names, []).append(data)
    return [_group(names, array("q", b"".join(parts))) for names, parts in shapes.items()]


def _group(names: tuple[str, ...], words: array[int]) -> Group:
    width = _FIXED + len(names)
    step, time, monotonic, *values = (words[at::width].tobytes() for at in range(width))
    return Group(step, time, monotonic, {name: _narrowed(column) for name, column in zip(names, values, strict=True)})


def _narrowed(wide: bytes) -> bytes:
    """Little-endian float64 as float32 where every value is exactly one, NaN payloads included."""
    # a column of durations shows it at once, and is spared conversions
    if wide and not _fits(_DOUBLE.unpack_from(wide)[0]):
        return wide
    narrow = array("f", array("d", wide))
    return narrow.tobytes() if array("d", narrow).tobytes() == wide else wide


def _fits(value: float) -> bool:
    try:
        return value != value or _FLOAT.unpack(_FLOAT.pack(value))[0] == value
    except OverflowError:
        return False


def merge(groups: Iterable[Group]) -> list[Group]:
    """Joins groups of the same names; rows keep their order within a group."""
    shapes: dict[tuple[str, ...], list[Group]] = {}
    for group in groups:
        shapes.setdefault((*group.values,), []).append(group)
    return [same[0] if len(same) == 1 else _joined(names, same) for names, same in shapes.items()]


def _joined(names: tuple[str, ...], groups: list[Group]) -> Group:
    def joined(name: str) -> bytes:
        widths = {len(group.values[name]) // group.rows for group in groups if group.rows}
        if len(widths) <= 1:
            return b"".join(group.values[name] for group in groups)
        return b"".join(array("d", group.column(name)).tobytes() for group in groups)

    return Group(
        step=b"".join(group.step for group in groups),
        time=b"".join(group.time for group in groups),
        monotonic=b"".join(group.monotonic for group in groups),
        values={name: joined(name) for name in names},
    )


def is_finite(block: Packed) -> bool:
    """Whether all values are; now and then False of some that are, where their sum is beyond a float."""
    return math.isfinite(sum(array("d", block.data)))  # a step is a tiny number then, and harmless


def rows_in(block: Packed) -> list[Row]:
    """The rows again."""
    layout = _layout(len(block.names))
    whole = block.data[: block.rows * layout.size]
    return [(*row[:_FIXED], dict(zip(block.names, row[_FIXED:], strict=True))) for row in layout.iter_unpack(whole)]


@functools.lru_cache(maxsize=256)
def _layout(values: int) -> Struct:
    return Struct(f"<qdd{values}d")
