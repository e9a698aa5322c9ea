"""Holds what the training thread records about the step in progress: a trace of stamps, and the few values that
are needed at once.

One `StepState` belongs to one run. The hooks write to `state.current`, which is None when no run is active and in
every forked child. A hook adds a few items to the trace and returns; the sender's thread interprets them
(decode/phase_times.py): with the cold caches of a training step, the same arithmetic in a hook took four times as long.

Times are nanoseconds of `time.perf_counter_ns`, which is the monotonic clock on Linux. Nothing here locks; threads
exchange data by one append to a deque or one assignment.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.step import clusters
from perfagent.step.costs import clips_ns, log_ns
from perfagent.step.overflow import OverflowMark
from perfagent.step.pending_logs import CapturedLog, EarlyLog
from perfagent.step.row import OccasionalValues, OptimizerGradients, StepRow
from perfagent.step.trace import OPTIMIZER_END, Trace

if TYPE_CHECKING:
    from perfagent.device import DeviceClock, Event, Value
    from perfagent.step.gradients import GradientNorms
    from perfagent.step.roles import OptimizerSelection, RunLinks

__all__ = ["StepState", "lives", "now", "state", "unwatched"]

now = time.perf_counter_ns
_EARLY_LOGS = 1000
_EVENT_EVERY_S, _LONG_S = 1.0, 0.1
_as_row = tuple.__new__


class StepState:
    """The step in progress.

    rows: the sender's deque.
    completed: the last completed step.
    opened: a fetch, forward or backward pass of the next step has started.
    thread: the thread that steps the optimizer; hooks on other threads (prefetching, evaluation servers) do nothing.
    plain: the next backward pass is the first of its step, in full precision and on the CPU, and the step before had
        only one.
    loss_count: the number of losses backpropagated since the last step of any optimizer.
    off: nobody reads the trace any more.
    unusual: the step holds something that only some steps have (clipping, mixed precision, a closure).
    whole: the optimizer's step is timed outside of torch's wrapper, so the hooks inside do nothing.
    entered: id of the optimizer whose step is running. primary_id: id of the one whose steps count.
    measure_at: gradients are measured once this many steps are completed.
    boundary: called at the end of a step (causes/investigator.py).
    probe: its method `call(call, args, kwargs)` runs the root's next training call, once.
    clips: what was clipped since the last step (hooks/grad_clipping.py).
    early: log() calls before the steps are known.
    contents: looks into batches; made at the first one.
    """

    __slots__ = (
        "amp", "backward_depth", "boundary", "clips", "clock", "completed", "contents", "costs", "data_depth", "early",
        "entered", "gradients", "last", "links", "logs", "loss_count", "losses", "measure_at", "measured", "off", "opened",
        "phase_depth", "phases", "plain", "primary_id", "probe", "readers", "rows", "scaler_depth", "selection", "step_end",
        "thread", "trace", "unusual", "whole",
    )  # fmt: skip

    selection: OptimizerSelection

    def __init__(self, rows: deque[Any], links: RunLinks, *, start_step: int = 0) -> None:
        self.thread = get_ident()
        self.trace: Trace = []
        self.opened = self.plain = self.off = self.unusual = self.whole = False
        self.backward_depth = self.data_depth = self.phase_depth = self.scaler_depth = 0
        self.loss_count = self.entered = self.primary_id = self.step_end = 0
        self.clock: DeviceClock | None = None
        self.early: list[EarlyLog] = []
        self.boundary: Callable[[], None] | None = None
        self.measure_at = self.completed = start_step
        self.rows = rows
        self.last: StepRow | None = None
        self.gradients: GradientNorms | None = None
        self.probe: Any = None
        self.clips: Any = None
        self.readers: dict[int, Any] = {}
        self.contents: Any = None
        self.amp = clusters.MixedPrecision()
        self.measured = clusters.GradientMeasurement()
        self.costs = clusters.OverheadCounters()
        self.logs = clusters.StepCounting(early_step=start_step + 1 if start_step else 0)
        self.losses = clusters.LossState()
        self.phases = clusters.PhaseState()
        self.links = links
        OverflowMark.put(rows)

    def complete(self, lr: Value | None, skipped: Value | bool | None, event: Event | None) -> None:
        """Ends one step of the optimizer that counts with one append, and begins the next step.

        Takes the end time last, so that the step and its optimizer phase include our own work, as a timer
        around the call would.
        """
        if self.early:
            self.settle_early(self.completed + 1)
        self.completed = step = self.completed + 1
        rare = None
        if self.unusual or self.gradients is not None or skipped is not None:
            rare = self._occasional(skipped)
        elif self.loss_count == 1:
            self.plain = self.clock is None
        self.losses.accumulates = self.loss_count > 1
        trace = self.trace
        self.last = row = _as_row(StepRow, (step, self.step_end, self.loss_count, lr, trace, rare))
        self.trace = []
        self.loss_count = 0
        self.opened = False
        self.step_end = ended = now()
        trace.extend((ended, event, OPTIMIZER_END))
        self.rows.append(row)
        if self.boundary is not None:
            self.boundary()

    def _occasional(self, skipped: Value | bool | None) -> OccasionalValues:
        """Collects what only some steps have."""
        amp, measured = self.amp, self.measured
        taken = OptimizerGradients(self.gradients, measured.clip_norm, amp.grad_scale, 0.0, measured.moved)
        others = self.links.joint_step.of_step()
        found = OccasionalValues(
            taken, others, amp.scaler_scale, skipped, amp.skipped, measured.deferred, measured.clipped_scaled
        )
        self.plain = not self.unusual and self.loss_count == 1 and self.clock is None
        self.gradients = amp.grad_scale = amp.scaler_scale = measured.moved = None
        measured.clip_norm, measured.deferred = [], []  # the step keeps the old lists, which are read later
        measured.clipped_scaled = False
        if self.unusual:
            self.unusual = self.losses.inside_closure = amp.scaling = amp.unscaled = False
            amp.scaled.clear()
        return found

    def spent_ns(self, logged: Sequence[int]) -> float:
        """Returns the time that the hooks have taken from the training so far, on its thread or its device. logged: the
        sender's counts of log() calls."""
        counted = log_ns(*logged) + clips_ns(self.costs.clipped, self.costs.clipped_gradients)
        costs = self.costs
        return counted + costs.hooks_ns + costs.pass_ns + costs.device_ns + costs.batches_ns

    def plan_pass(self, after: int, step_ns: int) -> int:
        """Returns how many steps are completed when gradients are measured next."""
        period = self.links.governor.period(self.measured.planned_ns, step_ns)
        if not self.measured.aligned:
            return after + period
        period = 1 << (period - 1).bit_length()
        return (after // period + 1) * period

    def come_back(self) -> None:
        """Brings the next pass forward, but not into the step in progress, if steps have become longer since it was
        planned: at 0.3 ms a step that may be a thousand steps. On the sender's thread."""
        completed, step_ns = self.completed + 1, self.links.governor.step_ns
        if self.measured.planned_ns and step_ns:
            at = self.plan_pass(completed, step_ns)
            if 2 * (at - completed) < self.measure_at - completed:
                self.measure_at = at

    def report_phase(self, name: str, begin_step: int, duration_s: float, step: int, *, always: bool = True) -> None:
        """Sends the event of a part of the loop, so that it is shown although not every step has it. always: False for
        phases that may be short and in every step; one event a second is then enough. Any thread."""
        if not always and duration_s < _LONG_S:
            at, (reported_s, in_step) = time.monotonic(), self.phases.reported.get(name, (-math.inf, 0))
            soon = at - reported_s < _EVENT_EVERY_S and step - in_step <= 1
            self.phases.reported[name] = reported_s if soon else at, step
            if soon:
                return
        self.links.on_event("phase", {"name": name, "begin_step": begin_step, "duration_s": duration_s}, step=step)

    def claim_thread(self) -> bool:
        """Makes the calling thread, which is not the training thread, the training thread if the old one has done
        nothing of a step yet or no longer exists. Returns whether it did."""
        if (self.last is not None or self.trace or self.losses.seen_backward) and lives(self.thread):
            return False
        self.thread = get_ident()
        return True

    def move_to_thread(self, optimizer: object) -> bool:
        """Returns whether the training has moved to the calling thread, which is not the training thread and is about
        to step this optimizer."""
        if self.last is None:
            self.thread = get_ident()  # the first thread that steps is the training thread
            self.trace, self.loss_count = [], 0  # what another thread did is not part of its step
        elif self.primary_id == id(optimizer) and not (self.entered or self.opened):
            self.thread = get_ident()  # threads of a pool that take turns: of the first step on each, its end is known
        else:
            return self.claim_thread()
        return True

    def in_progress(self) -> int:
        """Returns the step for a log() call: n until the step after n starts."""
        return self.completed + self.opened

    def logged_at(self) -> int:
        """Returns the step of the newest log() call, or of another logger's if there is none, if such calls count the
        steps; otherwise the step in progress."""
        if self._is_stepped():
            return self.in_progress()
        by_calls = max(0, self.logs.early_step + sum(not log.goes_on for log in self.early) - 1)
        return by_calls or self.logs.captured_step

    def done_at(self) -> int:
        """Returns the last completed step; where log() calls or those of another logger count the steps, the newest's."""
        return self.completed if self._is_stepped() else self.logged_at()

    def _is_stepped(self) -> bool:
        """Whether the steps of an optimizer count, and not log() calls."""
        return self.last is not None or (self.losses.seen_backward and not self.logs.by_log)

    # ---- log() before the first backward pass

    def log_early(self, log: EarlyLog) -> None:
        """Keeps a call while it is not known whether this process will ever step an optimizer."""
        if self.early and (not self.logs.fetched or len(self.early) >= _EARLY_LOGS):
            self.settle_early(None)
        self.early.append(log)
        if "torch" not in sys.modules:  # no optimizer will step soon
            self.settle_early(None)
        self.rows.append(log)

    def settle_early(self, step: int | None) -> None:
        """Gives the waiting logs their step: the given one if training has begun; for None, one step a
        call. Any thread."""
        waiting, self.early = self.early, []
        for log in waiting:
            if step is None:
                log.settle_without_optimizer(self.logs.early_step)
                self.logs.early_step += not log.goes_on
            else:
                log.step = step

    # ---- log() after it, before the first step of an optimizer

    def unstepped(self) -> bool:
        """Called by log() while no optimizer has stepped: True if the call may not belong to the step in progress,
        since a second backward pass has begun. That is either accumulation, or a loop that updates its parameters by
        hand. (Giving all of these calls the first step left a loop that updates by hand with a single step.)"""
        if self.logs.by_log is not None:
            return self.logs.by_log
        at = len(self.trace)
        if self.logs.first_logged < 0:
            self.logs.first_logged = at
        return at != self.logs.first_logged

    def awaits_optimizer(self) -> bool:
        """True if log() calls between backward passes wait for the first step of an optimizer."""
        return self.last is None and self.logs.first_logged >= 0 and not self.logs.by_log

    def log_unstepped(self, log: EarlyLog) -> None:
        if self.logs.by_log:
            log.step = self.logs.early_step
            self.logs.early_step += not log.goes_on
        else:
            self.early.append(log)
        self.rows.append(log)

    def log_captured(self, metrics: dict[str, Any], step: int | None, own_step: int | None) -> None:
        """Appends what a script logs by another logger. step: what the call names, in whatever unit the script counts; else
        it is the step in progress, or the logger's own count where no optimizer steps. Moves no step of the run's own."""
        log = CapturedLog(metrics, step, own_step)
        if step is not None:
            pass
        elif self.last is not None or self.logs.by_log is False:
            log.step = self.in_progress()
        elif self.logs.by_log or "torch" not in sys.modules:  # nothing here will step an optimizer soon
            log.settle_without_optimizer(self.logged_at())
        else:
            if self.losses.seen_backward:
                # as log() asks: whoever waits for an optimizer's first step learns in the end that there is none
                self.unstepped()
            if len(self.early) >= _EARLY_LOGS:
                self.settle_early(None)
            self.early.append(log)
        self.rows.append(log)

    def settle_unstepped(self, *, by_log: bool) -> None:
        """Gives the logs between backward passes their step. by_log: no optimizer exists that could step.
        Any thread."""
        self.logs.early_step = max(self.logs.early_step, self.completed + 2)  # the first call has the first step
        self.logs.by_log = by_log
        self.settle_early(None if by_log else self.completed + 1)


def lives(thread: int) -> bool:
    """True if a thread with that ident exists, whether Python or another library started it."""
    return thread in getattr(threading, "_active", {}) or thread in sys._current_frames()


class _State:
    """current: the StepState that the hooks write to. An object with a slot, since that is the fastest to look up."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: StepState | None = None


state = _State()


@contextmanager
def unwatched() -> Iterator[None]:
    """Within, the hooks of the current run see nothing: steps that are no training (a search, a simulation) do not count."""
    before, state.current = state.current, None
    try:
        yield
    finally:
        if state.current is None and before is not None and not before.links.ended:
            state.current = before
