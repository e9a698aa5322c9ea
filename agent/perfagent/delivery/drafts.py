"""Drafts: what a tick noted, on the disk within 200 ms and made into columns once a second.

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
from perfagent.delivery.columns import Columns, Row, must_be_finite
from perfagent.delivery.row_packing import Packed, Packer, grouped, is_finite, merge, rows_in
from perfagent.step.row import Note
from perfagent.step.trace import BACKWARD, entries_of
from perfagent.wire import Event, Group

__all__ = ["Draft", "Read", "is_pressing", "is_pressing_block", "left_behind", "pieces", "read", "rows_of"]

PIECE_ROWS = 80
"""Rows that are read at a time: some 0.5 ms, with fewer than the 700 new objects that begin a collection."""
PIECE_BYTES = 2**16
"""Most bytes of packed rows to read at a time: 0.3 ms for 600 rows of 10 values."""
_as_note = tuple.__new__


class Draft(NamedTuple):
    """What one tick noted.

    context: what a reader in another process must know of the notes (`StepReader.context`). notes: of steps; from a file
    as lists. packed: all other rows.
    """

    context: list[Any] = []  # noqa: RUF012 - a NamedTuple; nobody changes it
    notes: list[Any] = []  # noqa: RUF012
    packed: Sequence[Packed] = ()
    events: Sequence[Event] = ()


Read = Callable[[Iterable[Draft]], list[Group]]


def rows_of(notes: Iterable[Any], reader: StepReader, lost: Callable[[object], None]) -> list[Row]:
    """The notes, read. lost: is called with one that cannot be read."""
    found: list[Row] = []
    for note in notes:
        try:
            found.append(reader.row(_as_note(Note, note)))
        except Exception:  # noqa: BLE001 - one damaged note must not take the others with it
            lost(note)
    return found


def pieces(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """Splits rows into pieces; each encoded draft is decoded when it is wanted, and not kept."""
    notes: list[Any] = []
    blocks: list[Packed] = []
    for draft in drafts:
        blocks += draft.packed
        notes += draft.notes
        del draft
        while len(notes) >= PIECE_ROWS:
            yield Draft([], notes[:PIECE_ROWS])
            del notes[:PIECE_ROWS]
        if sum(len(block.data) for block in blocks) >= PIECE_BYTES:
            yield Draft([], [], blocks)
            blocks = []
    if notes or blocks:
        yield Draft([], notes, blocks)


def read(draft: Draft, reader: StepReader, columns: Columns, lost: Callable[[object], None]) -> list[Group]:
    """The columns of a draft. lost: is called with a note that cannot be read."""
    packer, known, rows = Packer(columns), list[Packed](), rows_of(draft.notes, reader, lost)
    for block in draft.packed:
        if columns.knows(block.names):
            known.append(block)
        else:  # from another process, or the run has had as many series since
            rows += rows_in(block)
    for row in rows:
        packer.add(*row[:3], (*row[3],), row[3].values())
    return grouped([*known, *packer.take()])


def left_behind(drafts: Iterable[Draft]) -> list[Group]:
    """The groups in the drafts of another process. Raises whatever a damaged draft with a right checksum does."""
    reader = StepReader()
    columns = Columns()
    groups: list[Group] = []
    for draft in drafts:
        if draft.notes:
            reader.restore(draft.context)
        groups += read(draft, reader, columns, lambda _: None)
    return merge(groups)


def is_pressing(row: Row | Note) -> bool:
    """Whether a row of numbers holds what must not wait for the next frame: a loss or gradient that is not finite."""
    if not isinstance(row, Note):
        bad = any(not math.isfinite(value) and must_be_finite(name) for name, value in row[3].items())
        return bad or bool(row[3].get("grad/nonfinite"))
    if row.rare is None:
        return False  # a loss that is not finite makes a step unusual (hooks/backward.py)
    if is_pressing((0, 0.0, 0.0, row.rare)):
        return True
    losses = (entry[3] for entry in entries_of(row.trace) if entry[0] == BACKWARD)
    return any(loss is not None and loss - loss != 0.0 for loss in losses)


def is_pressing_block(block: Packed) -> bool:
    """Whether one of its rows is pressing."""
    return not is_finite(block) and any(map(is_pressing, rows_in(block)))
