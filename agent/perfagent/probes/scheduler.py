"""Schedules rare measurements of a single step: its floating-point operations, its modules' shares, its lines that wait for
the device or, without one, read single values.

The sender's thread decides which one is due and hands it to the training thread as a task between two steps. Only one
measurement runs at a time. After each, the next of its kind waits so long that all stay within a tenth of the agent's budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from perfagent.device import accelerator
from perfagent.measure.flops.step_recording import FlopCount
from perfagent.measure.modules import ModuleTimes
from perfagent.measure.synchronization import SynchronizingLines
from perfagent.measure.value_reads import ValueReads
from perfagent.probes.flops.step_flops import MOST_SIZES, StepFlops
from perfagent.probes.module_shares import module_shares, parts_of, ready
from perfagent.probes.untrained import UntrainedReport

if TYPE_CHECKING:
    from torch import nn

    from perfagent.causes.investigator import Investigator
    from perfagent.delivery.handoff import Handoff

__all__ = ["ScheduledProbes"]

FIRST_STEPS = 3
"""Steps before the first measurement: compiling, allocating and warming up distort them."""
LEAST_S = 60.0
IDLE_S, IDLEST_S = 1.0, 30.0
"""While no measurement is due: pauses until the next check."""
_SHARE_OF_CORE = 5e-5
"""Largest share of a core for the checks: with cold caches 0.3 ms for 100 parameters."""
_SHARE_OF_BUDGET = 0.1


Probe = FlopCount | ModuleTimes | SynchronizingLines | ValueReads


class ScheduledProbes:
    """model: returns the root module or None; device: returns the index of this rank's device or None. cpu: returns the CPU
    seconds of this thread."""

    def __init__(
        self,
        investigator: Investigator,
        handoff: Handoff,
        model: Callable[[], nn.Module | None],
        device: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._investigator, self._handoff, self._model, self._device = investigator, handoff, model, device
        self._clock, self._cpu = clock, cpu
        self._progress = investigator.progress
        self._begin = self._progress.completed
        self.flops = StepFlops(device)
        handoff.reader.add_flops = self.flops.add
        self._untrained = UntrainedReport(self._progress, investigator.add, model, clock)
        self._due: dict[type[Probe], float] = {}
        self._ask_at = 0.0
        self._running: Probe | None = None
        self._trained: int | None = None
        self._changes = 0
        self._budget = handoff.config.overhead_budget_pct / 100.0

    def poll(self) -> float:
        """On the sender's thread. Returns the time (of its clock) before which nothing is due."""
        p = self._progress
        self._tell_loss()
        if p.links.ended or p.completed - self._begin < FIRST_STEPS:
            return self._ask_at
        untrained_due = self._untrained.poll()
        if self._running is not None:
            self._finish(self._running)
        elif self._clock() >= self._ask_at:
            self._begin_probe()
        return min(self._ask_at, untrained_due)

    def close(self) -> None:
        """On the thread that ends the run."""
        self._tell_loss()
        self._untrained.close()
        if self._running is not None:
            self._running.close()

    def _tell_loss(self) -> None:
        """What the loss of the first step was made of (loss_function.py)."""
        made = self._progress.losses.loss_made
        if made:
            self._progress.losses.loss_made = {}
            self._handoff.event("loss", made, step=self._progress.completed)

    def _begin_probe(self) -> None:
        began = self._cpu()
        self._notice_what_is_trained()
        asking_s = self._cpu() - began
        for make in (self._count, self._time_modules, self._find_lines):
            self._running = make()
            if self._running is not None:
                self._investigator.add(self._running)
                return
        self._ask_at = self._clock() + min(IDLEST_S, max(IDLE_S, asking_s / _SHARE_OF_CORE))

    def _is_due(self, kind: type[Probe]) -> bool:
        return self._clock() >= self._due.get(kind, 0.0)

    def _notice_what_is_trained(self) -> None:
        """Counts a step's operations again if layers were frozen or unfrozen, or another model is trained. 20 µs for 300
        parameters."""
        optimizer = self._progress.selection.primary
        groups = [group["params"] for group in [*optimizer.param_groups]] if optimizer is not None else []
        trained = hash(tuple([id(one) for group in groups for one in [*group] if one.requires_grad]))
        if not groups or trained == self._trained:
            return
        if self._trained is not None:
            self.flops.forget()
            self._changes += 1
            if self._changes > MOST_SIZES:
                self._due[FlopCount] = self._clock() + LEAST_S
        self._trained = trained

    def _count(self) -> FlopCount | None:
        wanted = self._is_due(FlopCount) and self.flops.wants()
        self.flops.running = FlopCount(self._progress) if wanted else None
        return self.flops.running

    def _time_modules(self) -> ModuleTimes | None:
        if not self._is_due(ModuleTimes):
            return None
        model = self._model()
        times = None if model is None else ModuleTimes(self._progress, parts_of(model))
        if times is None or times.over:
            self._due[ModuleTimes] = self._clock() + LEAST_S
            return None
        return times

    def _find_lines(self) -> SynchronizingLines | ValueReads | None:
        on_cuda = self._device() is not None and accelerator().kind == "cuda"
        kind = SynchronizingLines if on_cuda else ValueReads
        return kind(self._progress) if self._is_due(kind) else None

    def _finish(self, probe: Probe) -> None:
        p = self._progress
        if not probe.over or (isinstance(probe, ModuleTimes) and not ready(probe)):
            return
        if isinstance(probe, FlopCount) and probe.step and not self.flops.has_seen(probe.step) and not p.links.ended:
            return
        self._running = None
        p.costs.hooks_ns += probe.cost_ns
        if isinstance(probe, FlopCount):
            if probe.step:  # else something else was going on: try again
                self.flops.take(probe, self._model())
            return
        rest_s = probe.cost_ns / 1e9 / (_SHARE_OF_BUDGET * self._budget)
        self._due[type(probe)] = self._clock() + max(LEAST_S, rest_s)
        if not probe.step:
            return
        values = module_shares(probe, p.clock) if isinstance(probe, ModuleTimes) else probe.values()
        if values:
            p.rows.append((probe.step, time.time(), time.monotonic(), tuple(values), [*values.values()]))
        if not isinstance(probe, ModuleTimes) and probe.lines:
            self._handoff.event("sync", {"lines": probe.most_frequent()}, step=probe.step)
