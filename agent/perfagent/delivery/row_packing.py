"""Packs rows of numbers under names into bytes at the tick that collects them: the form that they have on their way to a
frame.

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
from perfagent.delivery.wakeup import yield_gil
from perfagent.wire import Group

__all__ = ["Packed", "Packer", "grouped", "is_finite", "is_whole", "last_row", "rows_in"]

_FIXED = 3
"""Words before the values: step, Unix time, monotonic."""
_MOST_SHAPES = 32
"""Layouts whose names are cached between ticks."""
_MANY_WORDS = 2**13
"""So many are made into columns in 0.3 ms, 600 rows of 10 values."""
_FLOAT, _DOUBLE = Struct("<f"), Struct("<d")


class Packed(NamedTuple):
    """Rows of one shape, one after the other."""

    names: tuple[str, ...]
    data: bytes

    @property
    def rows(self) -> int:
        return len(self.data) // _layout(len(self.names)).size

    @property
    def samples(self) -> int:
        return self.rows * len(self.names)


class Packer:
    """Packs the rows of one tick, by their names. meets: is called with names that it has not met yet."""

    def __init__(self, columns: Columns, meets: Callable[[tuple[str, ...]], None] | None = None) -> None:
        self._columns, self._meets = columns, meets
        self._shapes: dict[tuple[str, ...], tuple[Callable[..., bytes], list[bytes]]] = {}

    def add(self, step: int, time: float, monotonic: float, names: tuple[str, ...], values: Collection[object]) -> None:
        """Packs what may be stored of a row; the rest is counted in the columns. A hostile object among the names may raise
        anything."""
        try:
            if (shape := self._shape(names)) is not None:
                pack, parts = shape
                parts.append(pack(step, time, monotonic, *values))
                return
        except Exception:  # noqa: BLE001, S110 - struct.error of what is no number or too large; what an object of the user's raises
            pass
        checked = self._columns.checked((step, time, monotonic, dict(zip(names, values, strict=False))))
        if checked is not None and (shape := self._shape((*checked[3],))) is not None:
            pack, parts = shape
            parts.append(pack(*checked[:3], *checked[3].values()))

    def _shape(self, names: tuple[str, ...]) -> tuple[Callable[..., bytes], list[bytes]] | None:
        """What packs rows of these names, and the rows; None if not all names may be stored."""
        found = self._shapes.get(names)
        if found is None and names and self._columns.knows(names):
            if self._meets is not None:
                self._meets(names)
            found = self._shapes[names] = _layout(len(names)).pack, []
        return found

    def take(self) -> list[Packed]:
        """What was packed since the last time. The names stay, since those of the next tick will be the same."""
        taken = [Packed(names, b"".join(parts)) for names, (_, parts) in self._shapes.items() if parts]
        for _, parts in self._shapes.values():
            parts.clear()
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.clear()
        return taken


def grouped(blocks: Iterable[Packed]) -> list[Group]:
    """The columns of packed rows, one group for each shape."""
    shapes: dict[tuple[str, ...], list[bytes]] = {}
    for names, data in blocks:
        shapes.setdefault(names, []).append(data)
    return [_group(names, array("q", b"".join(parts))) for names, parts in shapes.items()]


def _group(names: tuple[str, ...], words: array[int]) -> Group:
    width = _FIXED + len(names)
    columns: list[bytes] = []
    for at in range(width):
        column = words[at::width].tobytes()
        columns.append(column if at < _FIXED else _narrowed(column))
        if len(words) > _MANY_WORDS:
            yield_gil()
    step, time, monotonic, *values = columns
    return Group(step, time, monotonic, dict(zip(names, values, strict=True)))


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


def is_whole(block: Packed) -> bool:
    """Whether it ends with a row, as every block does that is not damaged."""
    return bool(block.names) and len(block.data) % _layout(len(block.names)).size == 0


def is_finite(block: Packed) -> bool:
    """Whether all values are; now and then False of some that are, where their sum is beyond a float."""
    return math.isfinite(sum(array("d", block.data)))  # a step is a tiny number then, and harmless


def rows_in(block: Packed) -> list[Row]:
    """The rows again."""
    unpacked = _layout(len(block.names)).iter_unpack(block.data)
    return [(*row[:_FIXED], dict(zip(block.names, row[_FIXED:], strict=True))) for row in unpacked]


def last_row(block: Packed) -> Row:
    return rows_in(block._replace(data=block.data[-_layout(len(block.names)).size :]))[0]


@functools.lru_cache(maxsize=256)
def _layout(values: int) -> Struct:
    return Struct(f"<qdd{values}d")
