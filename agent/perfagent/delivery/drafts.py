"""Drafts: rows as they were noted, on the disk within 200 ms and made into columns once a second.

Making columns of twenty rows costs half of what it costs for a hundred, and the interpreter finds its caches cold every
time: so a tick only writes down what was noted, and a frame is read from its drafts when it is cut. What was written is
kept as bytes: an object that lives until then counts for the garbage collector, which runs on the thread that makes the
700th. In a loop of 800 log() calls a second it ran 2 to 3 times a second, up to 13 ms each; not once now. Whoever sends
the drafts of a killed process reads them in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.columns import Columns, merge, must_be_finite
from perfagent.delivery.row_packing import Packed, grouped, is_finite, rows_in
from perfagent.step.row import Note
from perfagent.step.trace import BACKWARD, entries_of
from perfagent.wire import Group

__all__ = ["Draft", "Read", "is_pressing", "is_pressing_block", "left_behind", "pieces", "read", "rows_of"]

PIECE_ROWS = 80
"""Rows that are read at a time: some 0.5 ms, with fewer than the 700 new objects that begin a collection."""
PIECE_BYTES = 2**16
"""Of packed rows, likewise: 0.3 ms for 600 rows of 10 values."""
_NOTE = len(Note._fields)
_as_note = tuple.__new__


class Draft(NamedTuple):
    """What one tick noted. From a file, all of it as lists.

    context: what a reader in another process must know besides (`StepReader.context`). rows: notes of steps, and other
    rows that cannot be packed. packed: rows with their names, and users' rows.
    """

    context: list[Any]
    rows: list[Any]
    packed: Sequence[Packed] = ()


Read = Callable[[Iterable[Draft]], list[Group]]


def rows_of(rows: Iterable[Any], reader: StepReader, lost: Callable[[Any], None]) -> list[tuple[Any, ...]]:
    """The rows with their notes read. lost: is called with a note that cannot be read."""
    found: list[tuple[Any, ...]] = []
    for row in rows:
        if len(row) != _NOTE:
            found.append(row)
            continue
        try:
            found.append(reader.row(_as_note(Note, row)))
        except Exception:  # noqa: BLE001 - one damaged note must not take the others with it
            lost(row)
    return found


def pieces(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The same rows in pieces; from encoded drafts each is decoded when it is wanted, and not kept."""
    rows: list[Any] = []
    blocks: list[Packed] = []
    size = 0
    for draft in drafts:
        blocks += draft.packed
        size += sum(len(block.data) for block in draft.packed)
        for row in draft.rows:
            rows.append(row)
            if len(rows) >= PIECE_ROWS:
                yield Draft([], rows)
                rows = []
        del draft
        if size >= PIECE_BYTES:
            yield Draft([], [], blocks)
            blocks, size = [], 0
    if rows or blocks:
        yield Draft([], rows, blocks)


def read(drafts: Sequence[Draft], reader: StepReader, columns: Columns, lost: Callable[[Any], None]) -> list[Group]:
    """The columns of drafts of one process. lost: is called with the error of a row that cannot be read."""
    rows = [row for draft in drafts for row in draft.rows]
    steps = [row for row in rows if len(row) == _NOTE]
    others = [_typed(row) if len(row) == 5 else row for row in rows if len(row) != _NOTE]
    blocks: list[Packed] = []
    for block in (block for draft in drafts for block in draft.packed):
        if columns.knows(block.names):
            blocks.append(block)
        else:  # from another process, or the run has had as many series since
            others += rows_in(block)
    return grouped(blocks) + groups_of(others, columns, lost) + groups_of(rows_of(steps, reader, lost), columns, lost)


def groups_of(rows: list[tuple[Any, ...]], columns: Columns, lost: Callable[[Any], None]) -> list[Group]:
    try:
        return columns.groups(rows)
    except Exception:  # noqa: BLE001 - a hostile object among a user's names or values costs its own row and no other
        groups = []
        for row in rows:
            try:
                groups += columns.groups([row])
            except Exception:  # noqa: BLE001
                lost(row)
        return merge(groups)


def left_behind(drafts: Iterable[Draft]) -> list[Group]:
    """The groups in the drafts of another process, as they came from its files."""
    reader = StepReader()
    columns = Columns()
    groups: list[Group] = []
    for draft in drafts:
        reader.restore(draft.context)
        groups += read([draft], reader, columns, _forgotten)
    return merge(groups)


def _forgotten(row: Any) -> None:
    """A note of another process that cannot be read, although its record's checksum is right."""


def _typed(row: Sequence[Any]) -> tuple[Any, ...]:
    """A row with its names; files know lists only."""
    step, time, monotonic, names, values = row
    return step, time, monotonic, tuple(names), values


def is_pressing(row: Any) -> bool:
    """Whether a row holds what must not wait for the next frame: a loss or gradient value that is not finite."""
    if len(row) == _NOTE:
        if row.rare is None:
            return False  # a loss that is not finite makes a step unusual (hooks/backward.py)
        if row.rare.get("grad/nonfinite") or _bad_gradient(row.rare):
            return True
        losses = (entry[3] for entry in entries_of(row.trace) if entry[0] == BACKWARD)
        return any(loss is not None and loss - loss != 0.0 for loss in losses)
    values = row[4] if len(row) == 5 else row[3].values()
    if _finite(values):
        return len(row) == 5 and "grad/nonfinite" in row[3] and bool(row[4][row[3].index("grad/nonfinite")])
    named = zip(row[3], row[4], strict=False) if len(row) == 5 else row[3].items()
    return any(must_be_finite(name) and not _finite((value,)) for name, value in named)


def is_pressing_block(block: Packed) -> bool:
    """Whether one of its rows is pressing."""
    return not is_finite(block) and any(map(is_pressing, rows_in(block)))


def _finite(values: Iterable[float]) -> bool:
    """A sum is finite only if every term is. A whole number may be beyond what a float can be."""
    try:
        return math.isfinite(sum(values))
    except (OverflowError, TypeError):  # or no number at all, which is counted when it is read
        return False


def _bad_gradient(values: dict[str, float]) -> bool:
    return any(name.startswith("grad/") and not math.isfinite(value) for name, value in values.items())
