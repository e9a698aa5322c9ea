"""What usual steps have in common is noted once; what differs between them is a row of numbers.

Most steps of a training do the same things in the same order: their traces differ in times and in the loss. Such steps are packed
at the tick that collects them, each as one struct, and read column by column (alike.py): no entry of theirs becomes an object
again. Two steps that follow one another and agree begin a block; any other step stays a note.
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
"""By kind of entry, how each of its items is packed; a dot: what alike steps share."""
_FIXED = "qqddd"
"""Before the stamps: step, began, wall, lr, user_loss (0.0 where the user logs none)."""
_MOST_STEPS = 256
"""Of one block: some 0.5 ms to read, with cold caches."""
_MOST_PATIENCE = 64


class Steps(NamedTuple):
    """Steps that follow one another. alike: the kinds of their entries, whether the user logs their loss, and what else they
    share. rare: of some steps, by their place, the series that only some steps have."""

    alike: Sequence[Any]
    data: bytes
    rare: Sequence[tuple[int, dict[str, float]]]


class Layout:
    """Of the traces with these kinds of entries. length: their items; shared, stamps: get those out of a trace.

    data, returned, cleared: places of such entries, None where there are none; forward, backward: of those that are in each.
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
        """A stamp of every step: ns. entry: its place; item: which of its items."""
        return words[self._columns[entry, item] :: len(_FIXED) + len(self._columns)]

    def reals(self, words: array[int], entry: int, item: int) -> array[float]:
        """The same of a float."""
        return array("d", self.column(words, entry, item).tobytes())

    def fixed(self, words: array[int], number: int) -> array[Any]:
        """One of the items before the stamps, of every step."""
        return array(_FIXED[number], words[number :: len(_FIXED) + len(self._columns)].tobytes())

    def common(self, shared: Sequence[Any], entry: int, item: int) -> Any:
        """What the steps share."""
        return shared[self._shared[entry, item]]

    def trace(self, shared: Sequence[Any], stamps: Sequence[float]) -> Trace:
        """The trace of one step again."""
        numbers, others = iter(stamps), iter(shared)
        return [next(others if code == "." else numbers) for kind in self.kinds for code in _STAMPS[kind]]


@functools.lru_cache(maxsize=256)
def layout_of(kinds: tuple[int, ...]) -> Layout | None:
    """One batch at most, one call of the model, one backward pass, one optimizer; None for any other step."""
    if kinds[-4:] != (BACKWARD, BACKWARD_END, OPTIMIZER, OPTIMIZER_END):
        return None
    start = kinds[1:-4] if kinds[0] == DATA else kinds[:-4]
    if start[:1] != (FORWARD,) or start[1:] not in ((), (RETURNED,), (CLEARED,), (RETURNED, CLEARED)):
        return None
    return Layout(kinds)


class StepPacker:
    """Packs the usual steps of one tick.

    Whoever collects many looks at each itself: one whose trace is `length` long and has `shared` in common is packed by `pack`
    into `parts`, unless the user logs its loss. Any other is for `add`.
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
        """A step, in the order of steps; note: as a Note. Where it cannot be packed, it goes to rows, behind those that could."""
        if not self._packs(note, rows):
            self.take(rows)
            rows.append(note)

    def take(self, rows: list[Any]) -> None:
        """What was packed goes to rows. What the steps share stays: those of the next tick will be the same."""
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
        """Whether a step shares what those of this block share. Two others in a row that agree begin a block of theirs."""
        layout = self._layout
        if layout is not None and len(trace) == layout.length and logged == self._logged and layout.shared(trace) == self.shared:
            return True
        if self._rest:  # a loop that hardly ever has two steps alike
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
    """How many steps a block holds; 1 where that cannot be known. steps, here and below: the fields of Steps."""
    try:
        layout = layout_of(tuple(steps[0][0]))
        return 1 if layout is None else len(steps[1]) // layout.struct.size
    except TypeError:  # damaged on the disk
        return 1


def words_of(layout: Layout, data: bytes) -> array[int]:
    """Raises ValueError where it is no whole number of steps."""
    if len(data) % layout.struct.size:
        raise ValueError(f"a step takes {layout.struct.size} bytes, {len(data)} are there")
    words = array("q", data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


def notes_in(steps: Sequence[Any]) -> Iterator[Note]:
    """Each step of a block by itself, as it was noted. Raises ValueError, TypeError or struct.error for a damaged one."""
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
    """Blocks that share the same, one after the other, as one. Raises ValueError for a damaged one."""
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
