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
from itertools import groupby
from typing import Any, NamedTuple

from perfagent.decode.columnar import read_alike
from perfagent.decode.step_blocks import Steps, count, joined, notes_in
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
FEWEST = 4
"""Steps for which it is worth reading them together."""
_STEP_BYTES = 512
"""Of packed steps that are read in the time of one row."""
_NOTE = len(Note._fields)
_STEPS = len(Steps._fields)
_as_note = tuple.__new__


class Draft(NamedTuple):
    """What one tick noted. From a file, all of it as lists.

    context: what a reader in another process must know besides (`StepReader.context`). rows: steps, packed where they
    are alike (layout.Steps) and else as notes, and other rows that cannot be packed. packed: rows with their names, and
    users' rows.
    """

    context: list[Any]
    rows: list[Any]
    packed: Sequence[Packed] = ()


Read = Callable[[Iterable[Draft]], list[Group]]


def rows_of(rows: Iterable[Any], reader: StepReader, lost: Callable[[Any], None]) -> list[tuple[Any, ...]]:
    """The rows with their notes read. lost: is called with the error of a note that cannot be read."""
    found: list[tuple[Any, ...]] = []
    for row in _one_by_one(rows, lost):
        if len(row) != _NOTE:
            found.append(row)
            continue
        try:
            found.append(reader.row(_as_note(Note, row)))
        except Exception:  # noqa: BLE001 - one damaged note must not take the others with it
            lost(row)
    return found


def _one_by_one(rows: Iterable[Any], lost: Callable[[Any], None]) -> Iterator[Any]:
    """The same rows with each packed step as a note."""
    for row in rows:
        if len(row) != _STEPS:
            yield row
            continue
        try:
            notes = [*notes_in(row)]
        except Exception:  # noqa: BLE001 - damaged
            for _ in range(count(row)):
                lost(row)
        else:
            yield from notes


def pieces(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """The same rows in pieces; from encoded drafts each is decoded when it is wanted, and not kept."""
    rows: list[Any] = []
    blocks: list[Packed] = []
    weight = size = 0
    for draft in drafts:
        blocks += draft.packed
        size += sum(len(block.data) for block in draft.packed)
        for row in draft.rows:
            rows.append(row)
            weight += len(row[1]) // _STEP_BYTES + 1 if len(row) == _STEPS else 1
            if weight >= PIECE_ROWS:
                yield Draft([], rows)
                rows, weight = [], 0
        del draft
        if size >= PIECE_BYTES:
            yield Draft([], [], blocks)
            blocks, size = [], 0
    if rows or blocks:
        yield Draft([], rows, blocks)


def read(drafts: Sequence[Draft], reader: StepReader, columns: Columns, lost: Callable[[Any], None]) -> list[Group]:
    """The columns of drafts of one process. lost: is called with the error of a row that cannot be read."""
    rows = [row for draft in drafts for row in draft.rows]
    steps = [row for row in rows if len(row) in (_NOTE, _STEPS)]
    others = [_typed(row) if len(row) == 5 else row for row in rows if len(row) not in (_NOTE, _STEPS)]
    blocks: list[Packed] = []
    for block in (block for draft in drafts for block in draft.packed):
        if columns.knows(block.names):
            blocks.append(block)
        else:  # from another process, or the run has had as many series since
            others += rows_in(block)
    return grouped(blocks) + groups_of(others, columns, lost) + _steps(steps, reader, columns, lost)


def _steps(steps: list[Any], reader: StepReader, columns: Columns, lost: Callable[[Any], None]) -> list[Group]:
    groups: list[Group] = []
    alone: list[Any] = []
    for alike, run in groupby(steps, _alike):
        blocks = [*run]
        if alike is None or sum(map(count, blocks)) < FEWEST:
            alone += blocks
            continue
        groups += groups_of(rows_of(alone, reader, lost), columns, lost)
        alone = []
        found = _together(blocks, reader, columns, lost)
        if found is not None:
            groups += found
            continue
        for block in blocks:  # a step of one of them is in the way of all
            found = _together([block], reader, columns, lost) if len(blocks) > 1 else None
            groups += groups_of(rows_of([block], reader, lost), columns, lost) if found is None else found
    groups += groups_of(rows_of(alone, reader, lost), columns, lost)
    return merge(groups)


def _together(
    blocks: list[Any], reader: StepReader, columns: Columns, lost: Callable[[Any], None]
) -> list[Group] | None:
    """The groups of blocks that share the same; None where their steps must be read one by one."""
    try:
        found = read_alike(reader, joined(blocks), columns.knows)
        usual = columns.group(*found[0]) if found is not None else None
    except Exception:  # noqa: BLE001 - one damaged block must not take the others with it
        return None
    if found is None or usual is None:
        return None
    return ([usual] if usual.rows else []) + groups_of(found[1], columns, lost)


def _alike(row: Any) -> Any:
    """What the steps of a block share; None for a note."""
    return row[0] if len(row) == _STEPS else None


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
