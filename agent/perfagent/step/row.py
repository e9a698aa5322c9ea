"""Holds a completed step on its way from the training thread to the sender.

The training thread stores references. Once everything that belongs to the step has arrived, the sender's thread makes a
note of it, which is plain data. decode/step_decoder.py turns a note into names and values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perfagent.device import Reading, Value, reached, ready, value_of, waiting
from perfagent.step.costs import rare_ns, steps_ns
from perfagent.step.trace import BACKWARD, Divided, Entry, Trace, entries_of, entry_count, events_of, forward_passes

if TYPE_CHECKING:
    from perfagent.step.roles import Measured
    from perfagent.step.state import StepState

__all__ = ["Extra", "Note", "Rare", "Row", "StepRow", "Taken"]

Row = tuple[int, float, float, dict[str, float]]
"""step, Unix time, monotonic time, values by name"""

_SETTLE_S = 0.15
"""A step's row waits this long for a loss that the script logs for the same step, unless the next step starts sooner.
Shorter than a tick of the spool, so that a kill loses no more than it would anyway."""
_as_note = tuple.__new__


class Note(NamedTuple):
    """One completed step as plain data.

    wall: Unix time of its end; 0.0: to be computed from the monotonic clock.
    began: end of the step before in ns; 0 for the first.
    roots: the number of losses that were backpropagated in it.
    user_loss: the value that the script logged as "loss".
    passes: forward passes of a later step, if those of this step are not known.
    trace: see trace.py; its last entry holds the end.
    rare: series that only some steps have.
    """

    step: int
    wall: float
    began: int
    roots: int
    lr: Any
    user_loss: float | None
    passes: int
    trace: Trace
    rare: dict[str, float] | None


class Extra(Protocol):
    """A measurement that only some steps have, and that may still be on the device."""

    def ready(self) -> bool:
        """True when the measurement has arrived. Never blocks."""

    def add(self, values: dict[str, float], rows: list[dict[str, float]], *, skipped: bool) -> None:
        """Adds to the step's series, or appends rows where there are many names. Called once, when ready."""


class Taken(NamedTuple):
    """The gradients that one optimizer used in a step.

    norms: the measured norms; None if not measured.
    clips: the norms that clipping returned; empty unless all of the gradients were clipped.
    scale: a factor that the gradients still carried when they were measured.
    skipped: above zero if a scaler kept the optimizer from using them; a fused optimizer knows this on its device.
    moved: how far its step moved the weights; None if not compared.
    """

    norms: Measured | None
    clips: Sequence[Value]
    scale: Value | None = None
    skipped: Value = 0.0
    moved: Measured | None = None

    def ready(self) -> bool:
        """True when all values have arrived. Never blocks."""
        measured = (self.norms is None or self.norms.ready()) and (self.moved is None or self.moved.ready())
        return measured and all(map(ready, (self.scale, self.skipped, *self.clips)))


class Rare:
    """What only some steps have: measured or clipped gradients, mixed precision, extras."""

    __slots__ = ("_all", "_extras", "_scale", "_skipped", "_skipped_before", "_taken", "others")

    def __init__(
        self,
        taken: Taken,
        others: list[Taken],
        scale: Value | None,
        skipped: Any,
        skipped_before: int,
        extras: list[Extra],
    ) -> None:
        """taken: the gradients of the optimizer that counts. others: those of optimizers that step on the same backward
        pass; more of them may still be added."""
        self._taken, self.others, self._extras = taken, others, extras
        self._all: tuple[Taken, ...] = ()
        self._scale, self._skipped, self._skipped_before = scale, skipped, skipped_before

    @property
    def measured(self) -> bool:
        return self._taken.norms is not None

    @property
    def scaled(self) -> bool:
        return self._scale is not None

    @property
    def compared(self) -> bool:
        """True if the weights before and after the step were compared."""
        return self._taken.moved is not None

    @property
    def has_norm(self) -> bool:
        return self._taken.norms is not None or bool(self._taken.clips)

    def ready(self) -> bool:
        self._all = taken = (self._taken, *self.others)  # an optimizer that is added now comes too late
        if not all(map(ready, (self._scale, self._skipped))) or not all(one.ready() for one in taken):
            return False
        return all(extra.ready() for extra in self._extras)

    def add(self, values: dict[str, float], p: StepState, when: tuple[int, float, float]) -> None:
        """Adds its series to `values`. Called once, when ready. when: step, Unix time and monotonic time
        of the extra rows."""
        scale = value_of(self._scale) if self._scale is not None else None
        on_device = isinstance(self._skipped, (Reading, float))  # a fused optimizer skips on the device
        skipped = value_of(self._skipped) > 0 if on_device else bool(self._skipped)
        if skipped and on_device:
            p.amp.skipped += 1  # known only here
        if scale is not None:
            values["amp/scale"] = scale
            values["amp/skipped"] = float(p.amp.skipped if on_device else self._skipped_before)
        rows: list[dict[str, float]] = []
        p.links.gradient_report.report_step(p, when, values, rows, self._all, skipped=skipped)
        for extra in self._extras:
            extra.add(values, rows, skipped=skipped)
        p.rows.extend((*when, row) for row in rows)


class StepRow(NamedTuple):
    """One completed step as the training thread leaves it. It has the fields of a `Note`, so a usual step
    is already one.

    A tuple, since that is the fastest for the training thread to make; the methods run on the sender's thread. began:
    end of the step before, 0 for the first; the last entry of the trace holds this step's end. roots: the number of
    losses that were backpropagated in it. wall, user_loss and passes are filled in later, where they are needed.
    """

    step: int
    wall: float
    began: int
    roots: int
    lr: Value | None
    user_loss: float | None
    passes: int
    trace: Trace
    rare: Rare | None

    @property
    def ended(self) -> int:
        """The end in ns; the trace ends with (ended, event, OPTIMIZER_END)."""
        return self.trace[-3]  # type: ignore[no-any-return]

    def ready(self, p: StepState) -> bool:
        """True when the row can be made; never blocks. Waits until the next step starts, since a loss that the script
        logs for this step takes precedence."""
        if not p.links.ended:
            waited_ns = time.perf_counter_ns() - max(self.ended, p.step_end)
            hurried = (
                p.completed > self.step
                or p.opened
                or (waited_ns >= _SETTLE_S * 1e9 and not p.links.pausing and not p.entered)
            )
            few = p.completed < self.step + 2
            waits = not hurried or (self.roots > 1 and few and p.links.reader.needs_next_step(self))
            if waits and not p.links.reader.loss_is_bad(self):  # a bad loss is reported at once
                return False
        return (self.rare is None or self.rare.ready()) and ((p.clock is None and not waiting()) or self._arrived(p))

    def _arrived(self, p: StepState) -> bool:
        """True if all values from a device have arrived."""
        entries = entries_of(self.trace)
        if not ready(self.lr) or not all(ready(value) for root in _all_roots(entries) for value in root):
            return False
        if p.clock is None:
            return True
        return all(map(reached, reversed(events_of(entries))))  # they may lie on several streams; the last comes last

    def plain(self, p: StepState) -> bool:
        """True if its note is plain data that can be read at any time: no device clock ran, no values came from a
        device, and no evaluation may be in it."""
        return p.clock is None and type(self.trace) is list and not waiting()

    def note(self, p: StepState) -> Note:
        """Returns the step as plain data. Called once, when ready."""
        ended = self.ended
        wall = time.time() - (time.perf_counter_ns() - ended) / 1e9
        rare: dict[str, float] | None = None
        if self.rare is not None:
            rare = {}
            p.costs.hooks_ns += rare_ns(scaled=self.rare.scaled)
            self.rare.add(rare, p, (self.step, wall, ended / 1e9))
        passes = 0
        if self.roots > 1 and p.last is not None and p.links.account.averages is None:
            passes = _passes_as_in(p.last, self.roots)
        p.costs.hooks_ns += steps_ns(1, entry_count(self.trace))
        user_loss = self._user_loss(p) if p.losses.user_losses else None
        return _as_note(Note, (self.step, wall, self.began, self.roots, self.lr, user_loss, passes, self.trace, rare))

    def with_user_loss(self, p: StepState) -> Note:
        """Returns the note of a plain step in a loop that logs its loss itself."""
        return _as_note(Note, (*self[:5], self._user_loss(p), *self[6:]))

    def _user_loss(self, p: StepState) -> float | None:
        return p.losses.user_losses.pop(self.step, None)

    def row(self, p: StepState) -> Row:
        """Returns the finished row of a step that has no plain note. Called once, when ready."""
        note = self.note(p)
        if type(self.trace) is not list:
            note = note._replace(trace=p.links.account.evaluations.fold(p, self.step, self.trace, first=not self.began))
        return p.links.reader.row(note, p.clock)


def _all_roots(entries: Sequence[Entry]) -> Iterator[tuple[Value | None, Divided]]:
    return ((entry[3], entry[4]) for entry in entries if entry[0] == BACKWARD)


def _passes_as_in(other: StepRow, roots: int) -> int:
    """Returns the forward passes of a step with `roots` losses, taken from another step, which may have fewer of
    both; 0: not known."""
    passes = forward_passes(entries_of(other.trace))
    return roots if passes and passes >= other.roots else passes
