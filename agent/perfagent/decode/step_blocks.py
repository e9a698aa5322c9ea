"""Packs usual steps into blocks: what they share is stored once, and only the numbers that differ are stored per step.

Most steps of a training do the same in the same order: their traces differ in times and in the loss. Such steps are
packed at the tick that collects them, one struct per step, and read column by column (columnar.py): their entries never
become objects again. Two consecutive steps that agree begin a block; any other step stays a note.

Reading steps one by one took three times the work. Packing nested entries took 2.6 µs a step, more than reading gains;
from the flat trace both threads together take 7 % less CPU (eight interleaved pairs).
"""

from __future__ import annotations

import functools
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from struct import Struct
from typing import Any, NamedTuple

from perfagent.step.row import Note
from perfagent.step.trace import (
    BACKWARD,
    BACKWARD_END,
    CLEARED,
    DATA,
    FIELDS,
    FORWARD,
    OPTIMIZER,
    OPTIMIZER_END,
    RETURNED,
    Trace,
    entries_of,
)

__all__ = ["Layout", "StepPacker", "Steps", "count", "joined", "layout_of", "notes_in", "words_of"]

_STAMPS = {
    DATA: "qq...", FORWARD: "q....", RETURNED: "q...", BACKWARD: "q.d..", BACKWARD_END: "q..", OPTIMIZER: "q..",
    OPTIMIZER_END: "q..", CLEARED: "qq.",
}  # fmt: skip
"""By kind of entry, how each item is packed; a dot marks an item that the steps of a block share."""
_FIXED = "qqddd"
"""The fields before the stamps: step, began, wall, lr, user_loss (0.0 if the script logs none)."""
_MOST_STEPS = 256
"""Most steps in a block, which takes some 0.5 ms to read with cold caches."""
_MOST_PATIENCE = 64


class Steps(NamedTuple):
    """Consecutive steps.

    alike: the kinds of their entries, whether the script logs their loss, and the items that they share.
    rare: by place of the step, the series that only some steps have.
    """

    alike: Sequence[Any]
    data: bytes
    rare: Sequence[tuple[int, dict[str, float]]]


class Layout:
    """The layout of traces with these kinds of entries.

    length: number of items in a trace.
    shared, stamps: functions that get those items out of a trace.
    data, returned, cleared: places of such entries; None if absent.
    forward, backward: places of entries that every layout has.
    """

    __slots__ = (
        "_columns", "_shared", "backward", "cleared", "data", "forward", "kinds", "length", "returned", "shared", "stamps",
        "struct",
    )  # fmt: skip

    def __init__(self, kinds: tuple[int, ...]) -> None:
        self.kinds = kinds
        self.data = 0 if kinds[0] == DATA else None
        self.forward = kinds.index(FORWARD)
        self.returned = kinds.index(RETURNED) if RETURNED in kinds else None
        self.cleared = kinds.index(CLEARED) if CLEARED in kinds else None
        self.backward = kinds.index(BACKWARD)
        codes = "".join(_STAMPS[kind] for kind in kinds)
        self.length = len(codes)
        numbers = [at for at, code in enumerate(codes) if code != "."]
        others = [at for at, code in enumerate(codes) if code == "."]
        self.stamps, self.shared = itemgetter(*numbers), itemgetter(*others)
        self.struct = Struct("<" + _FIXED + "".join(codes[at] for at in numbers))
        places = [(entry, item) for entry, kind in enumerate(kinds) for item in range(FIELDS[kind])]
        self._columns = {places[at]: len(_FIXED) + number for number, at in enumerate(numbers)}
        self._shared = {places[at]: number for number, at in enumerate(others)}

    def column(self, words: array[int], entry: int, item: int) -> array[int]:
        """Returns one stamp (ns) of every step. entry: the place of the entry; item: the place of the item in it."""
        return words[self._columns[entry, item] :: len(_FIXED) + len(self._columns)]

    def reals(self, words: array[int], entry: int, item: int) -> array[float]:
        """Returns one float of every step."""
        return array("d", self.column(words, entry, item).tobytes())

    def fixed(self, words: array[int], number: int) -> array[Any]:
        """Returns one of the fields before the stamps, of every step."""
        return array(_FIXED[number], words[number :: len(_FIXED) + len(self._columns)].tobytes())

    def common(self, shared: Sequence[Any], entry: int, item: int) -> Any:
        """Returns an item that the steps share."""
        return shared[self._shared[entry, item]]

    def trace(self, shared: Sequence[Any], stamps: Sequence[float]) -> Trace:
        """Rebuilds the trace of one step."""
        numbers, others = iter(stamps), iter(shared)
        return [next(others if code == "." else numbers) for kind in self.kinds for code in _STAMPS[kind]]


@functools.lru_cache(maxsize=256)
def layout_of(kinds: tuple[int, ...]) -> Layout | None:
    """Returns the layout of a step with at most one batch, one call of the model, one backward pass and one
    optimizer; else None."""
    if kinds[-4:] != (BACKWARD, BACKWARD_END, OPTIMIZER, OPTIMIZER_END):
        return None
    start = kinds[1:-4] if kinds[0] == DATA else kinds[:-4]
    if start[:1] != (FORWARD,) or start[1:] not in ((), (RETURNED,), (CLEARED,), (RETURNED, CLEARED)):
        return None
    return Layout(kinds)


class StepPacker:
    """Packs the usual steps of one tick.

    A caller with many steps checks each one itself: if its trace has `length` items and shares `shared`, and the script
    does not log its loss, the caller packs it by `pack` into `parts`. Any other step goes to `add`.
    """

    __slots__ = (
        "_layout", "_logged", "_next", "_patience", "_rare", "_rest", "length", "pack", "parts", "shared", "shared_of",
        "stamps_of",
    )  # fmt: skip

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._logged = False
        self._next: tuple[Layout, bool, tuple[Any, ...]] | None = None
        self._rest = self._patience = 0
        self._rare: list[tuple[int, dict[str, float]]] = []
        self.length = 0
        self.pack: Callable[..., bytes] = Struct("").pack
        self.shared: tuple[Any, ...] = ()
        self.shared_of: Callable[[Trace], tuple[Any, ...]] = tuple
        self.stamps_of: Callable[[Trace], tuple[Any, ...]] = tuple
        self.parts: list[bytes] = []

    def add(self, note: Sequence[Any], rows: list[Any]) -> None:
        """Adds a step, in step order; note: the fields of a Note. A step that cannot be packed goes to rows, after
        the packed ones."""
        if not self._packs(note, rows):
            self.take(rows)
            rows.append(note)

    def take(self, rows: list[Any]) -> None:
        """Moves the packed steps to rows. Keeps what the steps share, since those of the next tick will be the same."""
        parts, rare = self.parts, self._rare
        if not parts or self._layout is None:
            return
        alike = self._layout.kinds, self._logged, self.shared
        if len(parts) <= _MOST_STEPS:
            rows.append(Steps(alike, b"".join(parts), rare))
        else:
            for begin in range(0, len(parts), _MOST_STEPS):
                end = begin + _MOST_STEPS
                told = [(at - begin, more) for at, more in rare if begin <= at < end]
                rows.append(Steps(alike, b"".join(parts[begin:end]), told))
        self.parts, self._rare = [], []

    def _packs(self, note: Sequence[Any], rows: list[Any]) -> bool:
        step, wall, began, roots, lr, user_loss, _, trace, rare = note
        if roots != 1 or not began or type(lr) is not float or not self._agrees(trace, user_loss is not None, rows):
            return False
        try:
            data = self.pack(step, began, wall, lr, 0.0 if user_loss is None else user_loss, *self.stamps_of(trace))
        except Exception:  # noqa: BLE001 - struct.error: no loss, or a number that does not fit
            return False
        if rare is not None:
            self._rare.append((len(self.parts), rare))
        self.parts.append(data)
        return True

    def _agrees(self, trace: Trace, logged: bool, rows: list[Any]) -> bool:
        """True if a step shares what the steps of this block share. Two consecutive other steps that agree
        begin a new block."""
        layout = self._layout
        if (
            layout is not None
            and len(trace) == layout.length
            and logged == self._logged
            and layout.shared(trace) == self.shared
        ):
            return True
        if self._rest:  # a loop with hardly any two steps alike
            self._rest -= 1
            return False
        kinds = tuple([entry[0] for entry in entries_of(trace)])
        layout = layout_of(kinds)
        found = None if layout is None else (layout, logged, layout.shared(trace))
        before, self._next = (None if self.parts else self._next), found
        if found is None or (before is not None and before != found):
            self._next = None
            self._rest = self._patience = min(_MOST_PATIENCE, 2 * self._patience + 1)
            return False
        if before is None:
            return False
        self.take(rows)
        self._turn_to(*found)
        return True

    def _turn_to(self, layout: Layout, logged: bool, shared: tuple[Any, ...]) -> None:
        self._layout, self._logged, self.shared = layout, logged, shared
        self.length = -1 if logged else layout.length
        self.pack, self.shared_of, self.stamps_of = layout.struct.pack, layout.shared, layout.stamps
        self._patience = 0
        self._next = None


def count(steps: Sequence[Any]) -> int:
    """Returns how many steps a block holds; 1 if that cannot be known. steps, here and below: the fields of Steps."""
    try:
        layout = layout_of(tuple(steps[0][0]))
        return 1 if layout is None else len(steps[1]) // layout.struct.size
    except TypeError:  # damaged on disk
        return 1


def words_of(layout: Layout, data: bytes) -> array[int]:
    """Returns the block as 8-byte words. Raises ValueError if it is no whole number of steps."""
    if len(data) % layout.struct.size:
        raise ValueError(f"a step takes {layout.struct.size} bytes, {len(data)} are there")
    words = array("q", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def notes_in(steps: Sequence[Any]) -> Iterator[Note]:
    """Yields each step of a block as a note. Raises ValueError, TypeError or struct.error for a damaged block."""
    (kinds, logged, shared), data, rare = steps
    layout = layout_of(tuple(kinds))
    if layout is None:
        raise ValueError(f"no step has entries of the kinds {kinds}")
    more = dict(rare)
    for at, row in enumerate(layout.struct.iter_unpack(data)):
        step, began, wall, lr, user_loss = row[: len(_FIXED)]
        trace = layout.trace(shared, row[len(_FIXED) :])
        yield Note(step, wall, began, 1, lr, user_loss if logged else None, 0, trace, more.get(at))


def joined(blocks: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Joins consecutive blocks that share the same items. Raises ValueError for a damaged block."""
    if len(blocks) == 1:
        return blocks[0]
    parts: list[bytes] = []
    told: list[tuple[int, dict[str, float]]] = []
    before = 0
    for block in blocks:
        _, data, rare = block
        held = count(block)
        if any(at >= held for at, _ in rare):
            raise ValueError("something rare is told of a step that is not there")
        told += [(before + at, more) for at, more in rare]
        parts.append(data)
        before += held
    whole = Steps(blocks[0][0], b"".join(parts), told)
    if count(whole) != before:
        raise ValueError("one of the blocks is cut")
    return whole
