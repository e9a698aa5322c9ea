"""What the training thread notes about the step in progress: a trace of stamps, and the little that must be known at once.

One `Progress` belongs to one run; `state.current` is the one the hooks write to, None when no run is active and in every forked
child. A hook adds a few items to the trace and returns; what the stamps mean is worked out on the sender's thread
(account.py), because a hook runs with cold caches in the middle of somebody's training step and every object it touches costs.
Measured: the same arithmetic in the hooks cost four times as much in a real step as in a loop of its own.

Times are nanoseconds of `time.perf_counter_ns`, which is the monotonic clock on Linux. Nothing here locks; what crosses threads
is one append to a deque or one assignment.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from perfagent.step.costs import clips_ns, log_ns, steps_ns
from perfagent.step.mixed_precision import MixedPrecision
from perfagent.step.overflow import Mark
from perfagent.step.pending_logs import EarlyLog
from perfagent.step.row import Extra, Rare, StepRow, Taken
from perfagent.step.trace import BACKWARD, OPTIMIZER_END, Trace, entries_of
from perfagent.step.training_thread import OneOfThreads, lives

if TYPE_CHECKING:
    from perfagent.decode.step_decoder import StepReader
    from perfagent.device import DeviceClock, Value
    from perfagent.governor import Governor
    from perfagent.hooks.multi_optimizer import Together
    from perfagent.hooks.output_lifetime import Outputs
    from perfagent.signals.gradient_schedule import Health
    from perfagent.signals.updates import UpdateRatios

__all__ = ["Progress", "now", "state"]

now = time.perf_counter_ns
_EARLY_LOGS = 1000
_as_row = tuple.__new__


class _EveryStep:
    """What the hooks touch in every step: slots of their own, beside one another, since they lie in memory by class and name."""

    __slots__ = (
        "backward_depth", "boundary", "clips", "clock", "completed", "data_depth", "early", "entered", "gradients", "last",
        "looked", "measure_at", "off", "opened", "outputs", "phase_depth", "plain", "primary_id", "probe", "readers", "roots",
        "rows", "scaler_depth", "step_end", "thread", "trace", "unusual", "whole",
    )  # fmt: skip


class Progress(_EveryStep):
    """The step in progress.

    rows: the sender's deque. governor: decides how often gradients are measured. completed: the last completed step. opened:
    a fetch, forward or backward of the next one has started. thread: the thread that steps the optimizer; hooks on other
    threads (prefetching, evaluation servers) do nothing. plain: the next backward pass is the first of a step, in a loop
    whose last step had only one, in full precision and on the CPU. roots: how many losses were backpropagated since the last
    step of any optimizer. off: nobody takes what is noted any more. unusual: the step holds something that only some steps
    have (clipping, mixed precision, a closure). whole: the optimizer's step is timed from outside of torch's wrapper, and the
    hooks inside have nothing to do.
    """

    __slots__ = (
        "account",
        "accumulates",
        "alone_since",
        "amp",
        "began",
        "beside",
        "blocked",
        "by_log",
        "clip_norm",
        "clip_rounds",
        "clipped",
        "clipped_gradients",
        "device_ns",
        "early_step",
        "ended",
        "extras",
        "fetched",
        "first_logged",
        "found",
        "governor",
        "health",
        "hooks_ns",
        "inside_roots",
        "investigator",
        "look_at",
        "looks",
        "model_size",
        "moved",
        "newcomer",
        "on_event",
        "on_first_step",
        "on_next_model",
        "on_next_optimizer",
        "on_resumed",
        "overtaken",
        "parts_for",
        "pass_ns",
        "pausing",
        "primary",
        "proof",
        "reader",
        "release",
        "seen_backward",
        "steppers",
        "stream",
        "take_turns",
        "telling_ns",
        "together",
        "told_phases",
        "user_losses",
        "whole_loss",
    )

    def __init__(
        self,
        rows: deque[Any],
        governor: Governor,
        *,
        reader: StepReader,
        health: Health,
        together: Together,
        start_step: int = 0,
    ) -> None:
        self.thread = get_ident()
        self.trace: Trace = []
        self.opened = self.plain = self.off = False
        self.seen_backward = False
        self.backward_depth = self.data_depth = self.phase_depth = self.scaler_depth = 0
        self.clock: DeviceClock | None = None
        self.outputs: Outputs | None = None  # what the model returned, where the loss is in it
        self.proof: Callable[[Any], None] | None = None  # shown what the next backward pass starts from (forward.py)
        self.early: list[EarlyLog] = []
        self.roots = 0
        self.unusual = self.whole = False
        self.boundary: Callable[[], None] | None = None  # what waits for the end of a step (rootcause/investigator.py)
        self.investigator: Any = None
        self.entered = 0  # id of the optimizer whose step is running
        self.primary_id = 0
        self.measure_at = start_step  # gradients are measured when this many steps are completed
        self.completed = start_step
        self.rows = rows
        Mark.put(rows)
        self.reader = reader
        self.account = reader.account
        self.governor = governor
        self.step_end = 0
        self.last: StepRow | None = None
        self.pausing = False  # between the end of a step and what the loop does next, we do something that takes long
        self.parts_for = 0  # calls of the model that may be with a part of a batch (forward.py)
        self.pass_ns = 0  # what measuring gradients has cost so far; counted by the training thread
        self.telling_ns = 0.0  # and what telling of it costs the sender's
        self.device_ns = 0.0  # and by how much it took longer on the device; counted by the sender's
        self.hooks_ns = 0.0  # and all else, counted by the sender's
        self.clipped = self.clipped_gradients = 0  # calls that clip so far, and their gradients
        # loss
        self.accumulates = True  # several backward passes a step: until the first step is over, it may be so
        self.user_losses: dict[int, float] = {}  # logged by the user as "loss", by step, until the sender's thread takes them
        self.inside_roots = False
        self.whole_loss = -1, 0  # completed, and where the trace was, at the last loss whose parts were folded (backward.py)
        self.amp = MixedPrecision()
        # gradients
        self.gradients: Any = None
        self.moved: UpdateRatios | None = None  # how far the step has moved the weights
        self.health = health
        self.extras: list[Extra] = []  # of some steps: what else was measured in them; whoever adds one sets `unusual`
        self.probe: Any = None  # has a method `call(call, args, kwargs)` for the root model's next training call, once
        self.clip_norm: list[Value] = []
        self.looked = False  # the step's gradients were looked at inside of its closure
        self.clips: Any = None  # what was clipped since the last step (clipping.py)
        self.together = together
        self.clip_rounds = 0  # how often in the step before, with a backward pass in between
        # whose steps count
        self.primary: Any = None  # weak reference to the optimizer that owns most parameters
        self.began = -1  # completed when it became that
        self.alone_since = -1  # completed at its first step: that may have been told late
        self.newcomer = 0  # id of one that has come while the primary one stepped alone
        self.looks = self.look_at = 0  # how often another model was looked for, and from when on (ns) that may be again
        self.steppers: dict[int, tuple[int, int, list[float | None]]] = {}
        # id of other optimizers -> completed then, their steps since, and the rates of these
        self.beside: dict[int, Any] = {}  # weak references to other optimizers that stepped, by id; the newest few
        self.overtaken = 0, 0  # id of the optimizer before this one over the same parameters, and completed when it was left
        self.take_turns = False  # two over the same parameters step in turn: no stages
        self.blocked = 0
        self.model_size = 0  # trainable numbers of the model that the user named
        self.found: Any = None  # weak reference to the model that was found
        self.on_first_step: Callable[[Any], None] | None = None
        self.on_resumed: Callable[[int], None] | None = None  # takes the number of the first step to come
        self.on_next_model: Callable[[], None] | None = None
        self.on_next_optimizer: Callable[[Any], None] | None = None
        self.stream: int | None = None  # the CUDA stream that computes, by its handle
        self.on_event: Callable[..., None] | None = None  # the sender's: (kind, data, *, step)
        self.told_phases: dict[str, tuple[float, int]] = {}  # name -> when its last event was (monotonic clock, s), and its step
        # log() before anything is known about steps
        self.early_step = start_step + 1 if start_step else 0
        # log() between backward passes of which none was followed by an optimizer's step so far
        self.first_logged = -1  # where the trace was at the first such call
        self.by_log: bool | None = None  # no optimizer ever steps here, so each call is a step; None until that is asked
        self.fetched = False
        self.readers: dict[int, Any] = {}
        self.release: Any = None  # what the loop lets go of where it takes the next batch (release.py)
        self.ended = False

    def complete(self, lr: Value | None, skipped: Any, event: Any) -> None:
        """One step of the optimizer that counts is over: one append, and the next step begins.

        The end is taken last, so that the step and its optimizer phase hold what we did in them, as a timer round the call does.
        """
        if self.early:
            self.settle_early(self.completed + 1)
        self.completed = step = self.completed + 1
        rare = None
        if self.unusual or self.gradients is not None or skipped is not None:
            rare = self._rare(skipped)
        elif self.roots == 1:
            self.plain = self.clock is None
        self.accumulates = self.roots > 1
        trace = self.trace
        self.last = row = _as_row(StepRow, (step, 0.0, self.step_end, self.roots, lr, None, 0, trace, rare))
        self.trace = []
        self.roots = 0
        self.opened = False
        self.step_end = ended = now()
        trace.extend((ended, event, OPTIMIZER_END))
        self.rows.append(row)
        if self.boundary is not None:
            self.boundary()

    def complete_late(self, trace: Trace, lr: float | None) -> None:
        """A step that was over long before it was known for one. trace: all of it, its end included."""
        self.completed = step = self.completed + 1
        roots = sum(entry[0] == BACKWARD and entry[3] is not None for entry in entries_of(trace))
        self.rows.append(_as_row(StepRow, (step, 0.0, self.step_end, roots, lr, None, 0, trace, None)))
        self.step_end = trace[-3]

    def _rare(self, skipped: Any) -> Rare:
        """What only some steps leave behind."""
        taken = Taken(self.gradients, self.clip_norm, self.amp.grad_scale, 0.0, self.moved)
        rare = Rare(taken, self.together.of_step(self), self.amp.scaler_scale, skipped, self.amp.skipped, self.extras)
        self.plain = not self.unusual and self.roots == 1 and self.clock is None
        self.gradients = self.amp.grad_scale = self.amp.scaler_scale = self.moved = None
        self.clip_norm, self.extras = [], []  # the step keeps its own: they are read later
        if self.unusual:
            self.unusual = self.inside_roots = self.amp.scaling = self.amp.unscaled = False
            self.amp.scaled.clear()
        return rare

    def spent_ns(self, logged: Sequence[int], stepped: Sequence[int]) -> float:
        """What the hooks have taken of the training so far, of its thread or of its device. logged, stepped: the sender's
        counts of calls and steps."""
        counted = log_ns(*logged) + steps_ns(*stepped) + clips_ns(self.clipped, self.clipped_gradients)
        return counted + self.hooks_ns + self.pass_ns + self.device_ns

    def adopts(self) -> bool:
        """Whether the calling thread, which is not the one that trains, becomes it: it is the first that does anything of a step,
        or the other one is no more."""
        if (self.last is not None or self.trace or self.seen_backward) and lives(self.thread):
            return False
        self.thread = get_ident()
        return True

    def follows(self, optimizer: Any) -> bool:
        """Whether the training has moved to the calling thread, which is not the one that trains, and on which this is about to
        step."""
        if self.last is None:
            self.thread = get_ident()  # the first to step says which thread it is
            self.trace, self.roots = [], 0  # what another one did is none of its step
        elif self.primary_id == id(optimizer) and not (self.entered or self.opened):
            self.thread = OneOfThreads.of(*getattr(self.thread, "known", (self.thread,)), get_ident())
        else:
            return self.adopts()
        return True

    def in_progress(self) -> int:
        """The step that log() takes: n until the step after n starts."""
        return self.completed + self.opened

    def logged_at(self) -> int:
        """The step of the newest log() call, where those are what counts steps; else the step in progress."""
        if self.last is not None or (self.seen_backward and not self.by_log):
            return self.in_progress()
        return max(0, self.early_step + sum(not log.goes_on for log in self.early) - 1)

    # log() before the first backward pass --------------------------------------------------------------------------------------

    def log_early(self, log: EarlyLog) -> None:
        """Whether this process will ever step an optimizer is not known yet."""
        if self.early and (not self.fetched or len(self.early) >= _EARLY_LOGS):
            self.settle_early(None)
        self.early.append(log)
        if "torch" not in sys.modules:  # nothing here will step an optimizer soon
            self.settle_early(None)
        self.rows.append(log)

    def settle_early(self, step: int | None) -> None:
        """Gives the waiting logs their step: the first step if training has begun, else one step a call. Any thread."""
        waiting, self.early = self.early, []
        for log in waiting:
            if step is None:
                log.settle(self.early_step)
                self.early_step += not log.goes_on
            else:
                log.settle(step)

    def step_of_early(self, before: int) -> int:
        """The step of a waiting log, should this process end before an optimizer steps; before: how many steps those that wait
        before it are. After a backward pass that is the first one, as of micro-steps; a loop without an optimizer is not known
        for one yet. Any thread."""
        return self.completed + 1 if self.awaits_optimizer() else self.early_step + before

    # log() after it, before the first step of an optimizer ---------------------------------------------------------------------

    def unstepped(self) -> bool:
        """Asked by log() while no optimizer has stepped: whether the step of the call is not the one in progress for sure. A
        second backward pass has begun then, and that is accumulation, or a loop that updates its parameters by hand."""
        if self.by_log is not None:
            return self.by_log
        at = len(self.trace)
        if self.first_logged < 0:
            self.first_logged = at
        return at != self.first_logged

    def awaits_optimizer(self) -> bool:
        """Whether log() calls between backward passes wait for an optimizer's first step."""
        return self.last is None and self.first_logged >= 0 and not self.by_log

    def log_unstepped(self, log: EarlyLog) -> None:
        if self.by_log:
            log.settle(self.early_step)
            self.early_step += not log.goes_on
        else:
            self.early.append(log)
        self.rows.append(log)

    def settle_unstepped(self, *, by_log: bool) -> None:
        """by_log: there is no optimizer that could step. Any thread."""
        self.early_step = max(self.early_step, self.completed + 2)  # the first call was given the first step
        self.by_log = by_log
        self.settle_early(None if by_log else self.completed + 1)


class _State:
    """current: where the hooks write to. An object of its own: a slot is the cheapest thing to look up."""

    __slots__ = ("current",)

    def __init__(self) -> None:
        self.current: Progress | None = None


state = _State()
