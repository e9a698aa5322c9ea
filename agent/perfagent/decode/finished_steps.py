"""Asks whether all that belongs to a finished step has arrived, and turns its row into a note, on the sender's thread.

Functions of the run's state (`p`) and a step's row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from perfagent.device import Reading, device_was_read, reached, ready, value_of
from perfagent.step.costs import occasional_ns, steps_ns
from perfagent.step.row import AfterLastStep, Note, OccasionalValues, Row, StepRow
from perfagent.step.trace import BACKWARD, entries_of, entry_count, events_of, forward_passes

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["is_plain", "is_ready", "note_of", "row_of", "with_user_loss"]

_SETTLE_S = 0.15
"""A step's row waits this long for a loss that the script logs for the same step, unless the next step starts sooner.
Shorter than a tick of the spool, so that a kill loses no more than it would anyway."""
_as_note = tuple.__new__


def is_ready(p: StepState, row: StepRow) -> bool:
    """True when the note can be made; never blocks. Waits until the next step starts, since a loss that the script
    logs for this step takes precedence."""
    if type(row) is AfterLastStep:
        return True
    if not p.links.ended:
        waited_ns = time.perf_counter_ns() - max(row.trace[-3], p.step_end)
        idle = waited_ns >= _SETTLE_S * 1e9 and not p.links.pausing and not p.entered
        few = p.completed < row.step + 2
        waits = not (p.completed > row.step or p.opened or idle) or (
            row.loss_count > 1 and few and p.links.reader.needs_next_step(row)
        )
        if waits and not p.links.reader.loss_is_bad(row):  # a bad loss is reported at once
            return False
    if row.rare is not None and not row.rare.ready():
        return False
    if p.clock is None and not device_was_read():
        return True
    entries = entries_of(row.trace)
    if not ready(row.lr) or not all(ready(entry[3]) and ready(entry[4]) for entry in entries if entry[0] == BACKWARD):
        return False
    # events may lie on several streams; the last comes last
    return p.clock is None or all(map(reached, reversed(events_of(entries))))


def is_plain(p: StepState, row: StepRow) -> bool:
    """True if its note is plain data that can be read at any time: no device clock ran, no values came from a
    device, and no evaluation may be in it."""
    return p.clock is None and type(row.trace) is list and not device_was_read()


def note_of(p: StepState, row: StepRow) -> Note:
    """Returns the step as plain data. Called once, when ready."""
    ended = row.trace[-3]
    wall = time.time() - (time.perf_counter_ns() - ended) / 1e9
    rare = None
    if row.rare is not None:
        rare = _values_of(p, row.rare, (row.step, wall, ended / 1e9))
    passes = 0
    if row.loss_count > 1 and p.last is not None and p.links.facts.averages is None:
        passes = _passes_as_in(p.last, row.loss_count)
    p.costs.hooks_ns += steps_ns(1, entry_count(row.trace))
    user_loss = p.losses.user_losses.pop(row.step, None) if p.losses.user_losses else None
    return _as_note(Note, (row.step, wall, row.began, row.loss_count, row.lr, user_loss, passes, row.trace, rare))


def with_user_loss(p: StepState, row: StepRow) -> Note:
    """Returns the note of a plain step in a loop that logs its loss itself."""
    return _as_note(Note, (*row[:5], p.losses.user_losses.pop(row.step, None), *row[6:]))


def row_of(p: StepState, row: StepRow) -> Row:
    """Returns the finished row of a step that has no plain note. Called once, when ready."""
    evaluations = p.links.facts.evaluations
    if type(row) is AfterLastStep:  # as a row of log(): without a value it is not stored
        seconds = evaluations.after(p, row.step, row.trace)
        return row.step, row.wall, row.began / 1e9, {"phase/eval_s": seconds} if seconds else {}
    note = note_of(p, row)
    if type(row.trace) is not list:
        note = note._replace(trace=evaluations.fold(p, row.step, row.trace))
    return p.links.reader.row(note, p.clock)


def _values_of(p: StepState, rare: OccasionalValues, when: tuple[int, float, float]) -> dict[str, float]:
    """Returns the series that only some steps have. when: step, Unix time and monotonic time of further rows."""
    p.costs.hooks_ns += occasional_ns(scaled=rare.scale is not None)
    values: dict[str, float] = {}
    on_device = isinstance(rare.skipped, (Reading, float))  # a fused optimizer skips on the device
    skipped = rare.skipped is not None and value_of(rare.skipped) > 0
    if skipped and on_device:
        p.amp.skipped += 1  # known only here
    if rare.scale is not None:
        values["amp/scale"] = value_of(rare.scale)
        values["amp/skipped"] = float(p.amp.skipped if on_device else rare.skipped_before)
    p.links.reader.gradients.add(p, when, values, rare.arrived, skipped=skipped)
    if rare.clipped_scaled:
        values["grad/clipped_scaled"] = 1.0
    rows: list[dict[str, float]] = []
    for each in rare.deferred:
        each.add(values, rows)
    p.rows.extend((*when, row) for row in rows)
    return values


def _passes_as_in(other: StepRow, roots: int) -> int:
    """Returns the forward passes of a step with `roots` losses, taken from another step, which may have fewer of
    both; 0: not known."""
    passes = forward_passes(entries_of(other.trace))
    return roots if passes and passes >= other.loss_count else passes
