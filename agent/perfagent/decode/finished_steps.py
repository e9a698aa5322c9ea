"""Asks whether all that belongs to a finished step has arrived, and turns it into names and values, on the sender's thread.

Functions of the run's state (`p`), the reader of its steps and a step's row."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from perfagent.decode.deferred_values import add_deferred
from perfagent.decode.step_decoder import StepReader
from perfagent.device import Reading, device_was_read, reached, ready, value_of
from perfagent.step.costs import occasional_ns, steps_ns
from perfagent.step.row import AfterLastStep, OccasionalValues, Row, StepRow
from perfagent.step.trace import BACKWARD, entries_of, entry_count, events_of, forward_passes

if TYPE_CHECKING:
    from perfagent.step.state import StepState

__all__ = ["is_ready", "row_of"]

_SETTLE_S = 0.15
"""A step's row waits this long for a loss that the script logs for the same step, unless the next step starts sooner.
Shorter than a tick of the spool, so that a kill loses no more than it would anyway."""


def is_ready(p: StepState, reader: StepReader, row: StepRow) -> bool:
    """True when its row can be read; never blocks. Waits until the next step starts, since a loss that the script
    logs for this step takes precedence."""
    if type(row) is AfterLastStep:
        return True
    if not p.links.ended:
        over = p.completed > row.step or p.opened or _is_idle(p, row)
        few = row.loss_count > 1 and p.completed < row.step + 2
        waits = not over or (few and reader.needs_next_step(row))
        if waits and not reader.loss_is_bad(row):  # a bad loss is reported at once
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


def _is_idle(p: StepState, row: StepRow) -> bool:
    """True if nothing has happened for a while since the step ended."""
    waited_ns = time.perf_counter_ns() - max(row.trace[-3], p.step_end)
    return waited_ns >= _SETTLE_S * 1e9 and not p.links.pausing and not p.entered


def row_of(p: StepState, reader: StepReader, row: StepRow) -> Row:
    """Returns the finished row of a step. Called once, when ready."""
    if type(row) is AfterLastStep:  # as a row of log(): without a value it is not stored
        seconds = reader.evaluations.after(p, row.step, row.trace)
        monotonic = row.began / 1e9
        return row.step, reader.epoch + monotonic, monotonic, {"phase/eval_s": seconds} if seconds else {}
    p.costs.hooks_ns += steps_ns(1, entry_count(row.trace))
    rare = None if row.rare is None else _values_of(p, reader, row.rare, row)
    passes = 0
    if row.loss_count > 1 and p.last is not None and reader.facts.averages is None:
        passes = _passes_as_in(p.last, row.loss_count)
    user_loss = p.losses.user_losses.pop(row.step, None) if p.losses.user_losses else None
    if type(row.trace) is not list:
        row = row._replace(trace=reader.evaluations.fold(p, row.step, row.trace))
    return reader.row(row, rare, user_loss=user_loss, passes=passes, clock=p.clock)


def _values_of(p: StepState, reader: StepReader, rare: OccasionalValues, row: StepRow) -> dict[str, float]:
    """Returns the series that only some steps have."""
    monotonic = row.trace[-3] / 1e9
    when = row.step, reader.epoch + monotonic, monotonic
    p.costs.hooks_ns += occasional_ns(scaled=rare.scale is not None)
    values: dict[str, float] = {}
    on_device = isinstance(rare.skipped, (Reading, float))  # a fused optimizer skips on the device
    skipped = rare.skipped is not None and value_of(rare.skipped) > 0
    if skipped and on_device:
        p.amp.skipped += 1  # known only here
    if rare.scale is not None:
        values["amp/scale"] = value_of(rare.scale)
        values["amp/skipped"] = float(p.amp.skipped if on_device else rare.skipped_before)
    reader.gradients.add(p, when, values, rare.arrived, skipped=skipped)
    if rare.clipped_scaled:
        values["grad/clipped_scaled"] = 1.0
    for each in rare.deferred:
        add_deferred(p, when, values, each)
    return values


def _passes_as_in(other: StepRow, roots: int) -> int:
    """Returns the forward passes of a step with `roots` losses, taken from another step, which may have fewer of
    both; 0: not known."""
    passes = forward_passes(entries_of(other.trace))
    return roots if passes and passes >= other.loss_count else passes
