"""What the hooks know about the step in progress: plain numbers that they add to, and nothing that locks or allocates much.

One `Progress` belongs to one run; `active()` is the one the hooks write to, None when no run is active and in every forked
child. Times are nanoseconds of `time.perf_counter_ns`, which is the monotonic clock on Linux. All methods run on the training
thread unless they say otherwise; what crosses threads is one append to a deque or one assignment.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from typing import Any

from perfagent.device import DeviceClock, Value
from perfagent.governor import Governor
from perfagent.hooks.row import EarlyLog, Root, StepRow

__all__ = ["Progress", "activate", "active"]

now = time.perf_counter_ns

_MOST_BATCHES = 256
"""Batches of one loader that may wait for a backward pass (evaluation loaders never get one)."""
_MOST_LOADERS = 8
_EARLY_LOGS = 1000


class Progress:
    """The step in progress.

    rows: the sender's deque. governor: decides how often gradients are measured.
    completed: the last completed step. opened: a fetch, forward or backward of the next one has started. thread: the thread
    that steps the optimizer; hooks on other threads (prefetching, evaluation servers) do nothing.
    """

    def __init__(self, rows: deque[Any], governor: Governor, *, start_step: int = 0) -> None:
        self.rows = rows
        self.thread = get_ident()
        self.completed = start_step
        self.ended = False
        self.seen_backward = False
        self.last: StepRow | None = None
        self.on_first_step: Callable[[Any], None] | None = None
        # whose steps count
        self.model_size = 0  # trainable numbers of the model that the user named
        self.found: Any = None  # weak reference to the model that was found
        self.primary: Any = None  # weak reference to the optimizer that owns most parameters
        self.steppers: dict[int, int] = {}  # id of other optimizers -> steps since the primary's last one
        # log() before anything is known about steps
        self.early: list[EarlyLog] = []
        self.early_step = start_step + 1 if start_step else 0
        # loss
        self.averages: bool | None = None  # several unscaled roots of one step are averaged; None until it is known
        self.loss_by_user = False
        self.previous_roots: list[Root] = []
        # samples
        self.queues: dict[int, deque[tuple[int | None, int | None, bool]]] = {}
        self.readers: dict[int, Any] = {}
        self.loader = 0
        self.embedded: bool | None = None
        # mixed precision
        self.skipped = 0
        # device
        self.clock: DeviceClock | None = None
        # forward passes
        self.training_only = False
        # the agent's own cost
        self.own_ns = self.pass_ns = 0
        self.grad_cost_ns = 0
        self.grad_count = 0
        self.governor = governor
        self.every = 1  # gradients are measured every so many steps
        # nesting
        self.backward_depth = self.data_depth = self.phase_depth = self.scaler_depth = self.entered = self.blocked = 0
        self.step_end = 0
        self._begin()

    def _begin(self) -> None:
        """Empties what belongs to one step."""
        self.opened = False
        self.data_ns = self.backward_ns = self.optimizer_ns = 0
        self.fetches = self.batches = self.forwards = 0
        self.samples = self.tokens = 0
        self.forward_ns: int | None = None
        self.forward_start = self.forward_pending = self.forward_depth = self.forward_starts = 0
        self.root_size: tuple[int | None, int | None, bool] | None = None
        self.backward_start = self.optimizer_start = self.inside_ns = 0
        self.inside_roots = False
        self.roots: list[Root] = []
        self.scaled: dict[int, Root] = {}
        self.scaling = self.unscaled = False
        self.scaler_scale: Value | None = None
        self.clip_norm: list[Value] = []
        self.clip_count = 0
        self.clip_passes = 0
        self.gradients: Any = None
        self.grad_scale: Value | None = None  # gradients still carry this factor when a fused optimizer takes them
        self.phases_ns: dict[str, int] | None = None
        self.user_loss: float | None = None
        self.mark: Any = None
        self.device_forward: list[tuple[Any, Any]] = []
        self.device_backward: list[tuple[Any, Any]] = []
        self.device_optimizer: list[tuple[Any, Any]] = []

    def open(self) -> None:
        """A fetch, forward or backward of the next step starts: what is logged from now on belongs to that step."""
        self.opened = True
        if self.early and not self.seen_backward and self.fetches:
            self.settle_early(None)

    def in_progress(self) -> int:
        """The step that log() takes: n until the step after n starts."""
        return self.completed + self.opened

    # data ------------------------------------------------------------------------------------------------------------------

    def fetched(self, loader: int, started: int, ended: int) -> None:
        wait = ended - started
        self.data_ns += wait
        self.fetches += 1
        self.loader = loader
        if self.forward_start:  # fetched between the model's call and backward: not part of the forward pass
            self.forward_start += wait
        if self.entered:
            self.inside_ns += wait

    def queue(self, loader: int, size: tuple[int | None, int | None, bool]) -> None:
        waiting = self.queues.get(loader)
        if waiting is None:
            if len(self.queues) >= _MOST_LOADERS:
                oldest = next(iter(self.queues))
                del self.queues[oldest]
                self.readers.pop(oldest, None)
            waiting = self.queues[loader] = deque(maxlen=_MOST_BATCHES)
        waiting.append(size)

    def take_batch(self) -> None:
        """A backward pass starts: the batch that waited longest in the loader in use was meant for it."""
        size = None
        if self.loader:
            waiting = self.queues.get(self.loader)
            if waiting:
                size = waiting.popleft()
                self.batches += 1
        if size is None and not self.fetches and self.root_size is not None:
            size, self.root_size = self.root_size, None
        if size is None:
            return
        samples, tokens, embedded = size
        if samples:
            self.samples += samples
        if tokens and (not embedded or self.embedded):
            self.tokens += tokens

    # early logs ------------------------------------------------------------------------------------------------------------

    def log_early(self, log: EarlyLog) -> None:
        """log() before the first backward pass: whether this process will ever step an optimizer is not known yet."""
        if self.early and (not self.fetches or len(self.early) >= _EARLY_LOGS):
            self.settle_early(None)
        self.early.append(log)
        self.rows.append(log)

    def settle_early(self, step: int | None) -> None:
        """Gives the waiting logs their step: the first step if training has begun, else one step a call. Any thread."""
        waiting, self.early = self.early, []
        for log in waiting:
            if step is None:
                log.settle(self.early_step)
                self.early_step += 1
            else:
                log.settle(step)

    # the end of a step -----------------------------------------------------------------------------------------------------

    def complete(self, ended: int, lr: Value | None, skipped: Any) -> None:
        """One step of the optimizer that counts is over: one append, and the next step begins."""
        if self.early:
            self.settle_early(self.completed + 1)
        self.completed += 1
        row = StepRow(self, ended, lr, skipped)
        self.rows.append(row)
        self.last = row
        self.step_end = ended
        self.seen_backward = True
        self._begin()


_active: Progress | None = None


def active() -> Progress | None:
    """Where the hooks write to; None when no run is active, and in every forked child."""
    return _active


def activate(progress: Progress | None) -> None:
    global _active
    _active = progress
