"""Rows on their way from the training thread to the sender.

The training thread stores references. On the sender's thread, once all that belongs to a step is there, it becomes a note, which
is plain data; what the note says in names and values is worked out in reading.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perfagent.device import Reading, Value, ready, value_of, waiting
from perfagent.step.costs import rare_ns, steps_ns
from perfagent.step.trace import BACKWARD, Divided, Entry, Trace, entries_of, entry_count, events_of, forward_passes

if TYPE_CHECKING:
    from perfagent.signals.gradients import GradientNorms
    from perfagent.signals.updates import UpdateRatios
    from perfagent.step.state import Progress

__all__ = ["Extra", "Note", "Rare", "Row", "StepRow", "Taken"]

Row = tuple[int, float, float, tuple[str, ...], list[float]]
"""step, Unix time, monotonic time, names, values."""

_SETTLE_S = 0.15
"""A step's row waits this long for an explicit loss of the same step, unless the next step starts sooner: less than a tick of
the spool, so that a kill loses no more than it would anyway."""
_as_note = tuple.__new__


class Note(NamedTuple):
    """One completed step.

    wall: Unix time of its end, 0.0 where that is to be worked out from the monotonic clock. began: end of the step before, ns, 0
    for the first. roots: how many losses were backpropagated in it. user_loss: what the user logged as its "loss". passes:
    forward passes of a later step, where those of this one are not known. trace: see trace.py; its last entry holds the end.
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
    """What was measured in some steps only, and may still be on the device."""

    def ready(self) -> bool:
        """Never blocks."""

    def add(self, values: dict[str, float], rows: list[dict[str, float]], *, skipped: bool) -> None:
        """Adds to the step's own series, and rows of its own where the names are many; once, when ready."""


class Taken(NamedTuple):
    """The gradients that one optimizer took. norms: measured; None where they were not. clips: the norms that clipping told of
    them; empty where not all of them were clipped. scale: a factor that they still carried when they were measured. skipped:
    above zero where a scaler did not let it take them, which a fused optimizer knows on its device. moved: how far its step has
    moved the weights; None where that was not looked at."""

    norms: GradientNorms | None
    clips: Sequence[Value]
    scale: Value | None = None
    skipped: Value = 0.0
    moved: UpdateRatios | None = None

    def ready(self) -> bool:
        """Never blocks."""
        measured = (self.norms is None or self.norms.ready()) and (self.moved is None or self.moved.ready())
        return measured and all(map(ready, (self.scale, self.skipped, *self.clips)))


class Rare:
    """What not every step has: measured or clipped gradients, mixed precision, extras."""

    __slots__ = ("_all", "_extras", "_scale", "_skipped", "_skipped_before", "_taken", "others")

    def __init__(
        self, taken: Taken, others: list[Taken], scale: Value | None, skipped: Any, skipped_before: int, extras: list[Extra]
    ) -> None:
        """taken: by the optimizer that counts. others: by those that step on the same backward pass; more may yet come."""
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
        """Whether the weights before and after the step were."""
        return self._taken.moved is not None

    @property
    def has_norm(self) -> bool:
        return self._taken.norms is not None or bool(self._taken.clips)

    def ready(self) -> bool:
        self._all = taken = (self._taken, *self.others)  # one that comes now comes too late
        if not all(map(ready, (self._scale, self._skipped))) or not all(one.ready() for one in taken):
            return False
        return all(extra.ready() for extra in self._extras)

    def add(self, values: dict[str, float], p: Progress, when: tuple[int, float, float]) -> None:
        """Once, when ready. when: step, Unix time and monotonic time of the rows that this adds besides."""
        scale = value_of(self._scale) if self._scale is not None else None
        on_device = isinstance(self._skipped, (Reading, float))  # a fused optimizer skips on the device
        skipped = value_of(self._skipped) > 0 if on_device else bool(self._skipped)
        if skipped and on_device:
            p.amp.skipped += 1  # only here is it known
        if scale is not None:
            values["amp/scale"] = scale
            values["amp/skipped"] = float(p.amp.skipped if on_device else self._skipped_before)
        rows: list[dict[str, float]] = []
        p.health.report_step(p, when, values, rows, self._all, skipped=skipped)
        for extra in self._extras:
            extra.add(values, rows, skipped=skipped)
        p.rows.extend((*when, row) for row in rows)


class StepRow(NamedTuple):
    """One completed step as the training thread leaves it: the fields of a `Note`, so that a usual step is one as it stands.

    A tuple, since that is what the training thread makes fastest; the sender's thread asks it for more. began: end of the step
    before, 0 for the first; the last entry of the trace says when this one ended. roots: how many losses were backpropagated in
    it. wall, user_loss and passes are worked out later, where they are needed.
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
        """ns; the trace ends with (ended, event, OPTIMIZER_END)."""
        return self.trace[-3]  # type: ignore[no-any-return]

    def ready(self, p: Progress) -> bool:
        """Never blocks. Waits until the next step starts, since a loss logged by the user for this step takes precedence."""
        if not p.ended:
            waited_ns = time.perf_counter_ns() - max(self.ended, p.step_end)
            hurried = p.completed > self.step or p.opened or (waited_ns >= _SETTLE_S * 1e9 and not p.pausing and not p.entered)
            few = p.completed < self.step + 2
            waits = not hurried or (self.roots > 1 and few and p.reader.needs_next_step(self))
            if waits and not p.reader.loss_is_bad(self):  # such a loss waits for nothing
                return False
        return (self.rare is None or self.rare.ready()) and ((p.clock is None and not waiting()) or self._arrived(p))

    def _arrived(self, p: Progress) -> bool:
        """Whether what was on its way from a device has come."""
        entries = entries_of(self.trace)
        if not ready(self.lr) or not all(ready(value) for root in _all_roots(entries) for value in root):
            return False
        if p.clock is None:
            return True
        events = events_of(entries)
        return not events or bool(events[-1].query())

    def plain(self, p: Progress) -> bool:
        """Whether its note is plain data that can be read at any time: not where a device's clock ran, values came from a device,
        or an evaluation may be in it."""
        return p.clock is None and type(self.trace) is list and not waiting()

    def note(self, p: Progress) -> Note:
        """What can be written down of it; once, when ready."""
        ended = self.ended
        wall = time.time() - (time.perf_counter_ns() - ended) / 1e9
        rare: dict[str, float] | None = None
        if self.rare is not None:
            rare = {}
            p.hooks_ns += rare_ns(scaled=self.rare.scaled)
            self.rare.add(rare, p, (self.step, wall, ended / 1e9))
        passes = 0
        if self.roots > 1 and p.last is not None and p.account.averages is None:
            passes = _passes_as_in(p.last, self.roots)
        p.hooks_ns += steps_ns(1, entry_count(self.trace))
        user_loss = self._user_loss(p) if p.user_losses else None
        return _as_note(Note, (self.step, wall, self.began, self.roots, self.lr, user_loss, passes, self.trace, rare))

    def with_user_loss(self, p: Progress) -> Note:
        """The note of a plain step in a loop that logs its loss itself."""
        return _as_note(Note, (*self[:5], self._user_loss(p), *self[6:]))

    def _user_loss(self, p: Progress) -> float | None:
        return p.user_losses.pop(self.step, None)

    def row(self, p: Progress) -> Row:
        """The finished row; once, when ready. For what cannot be written down before."""
        note = self.note(p)
        if type(self.trace) is not list:
            note = note._replace(trace=p.account.evaluations.fold(p, self.step, self.trace, first=not self.began))
        return p.reader.row(note, p.clock)


def _all_roots(entries: Sequence[Entry]) -> Iterator[tuple[Value | None, Divided]]:
    return ((entry[3], entry[4]) for entry in entries if entry[0] == BACKWARD)


def _passes_as_in(other: StepRow, roots: int) -> int:
    """Forward passes of a step with so many losses, as another step has them, which may have had fewer of both; 0: not known."""
    passes = forward_passes(entries_of(other.trace))
    return roots if passes and passes >= other.roots else passes
