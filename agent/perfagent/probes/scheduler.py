"""Schedules rare measurements of a single step: its floating-point operations, its modules' shares, its lines that
wait for the device or, without one, read single values. And it asks now and then for parameters without an optimizer
(unoptimized.py), and tells what the loss is made of.

The sender's thread decides which one is due and hands it to the training thread as a task between two steps; ordinary
steps run none of this. Only one measurement runs at a time. After each, the next of its kind waits so long that all
stay within a tenth of the agent's budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from perfagent.device import accelerator
from perfagent.probes.unoptimized import Unoptimized
from perfagent.signals.flops.step_flops import MOST_SIZES, StepFlops
from perfagent.signals.flops.step_recording import FlopCount
from perfagent.signals.modules import ModuleTimes
from perfagent.signals.synchronization import SynchronizingLines
from perfagent.signals.value_reads import ValueReads

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Handoff
    from perfagent.rootcause.investigator import Investigator
    from perfagent.step.state import StepState

__all__ = ["Looks"]

FIRST_STEPS = 3
"""Steps before the first measurement, since compiling, allocating and warming up distort the first steps."""
LEAST_S = 60.0
IDLE_S, IDLEST_S = 1.0, 30.0
"""While no measurement is due: shortest and longest pause until the next check."""
_SHARE_OF_CORE = 5e-5
"""Largest share of a core for the checks: with cold caches 0.3 ms for 100 parameters, milliseconds for
thousands of them."""
_SHARE_OF_BUDGET = 0.1


class Looks:
    """The measurements of one run. model: returns the root module or None; device: returns the index of this rank's device
    or None. cpu: returns the CPU seconds of this thread."""

    def __init__(
        self,
        investigator: Investigator,
        sender: Handoff,
        model: Callable[[], Any],
        device: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.thread_time,
    ) -> None:
        self._investigator, self._sender, self._model, self._device, self._clock = (
            investigator,
            sender,
            model,
            device,
            clock,
        )
        self._cpu = cpu
        self._progress = investigator.progress
        self._begin = self._progress.completed
        self.flops = self._progress.links.reader.flops = StepFlops(device)
        self._unoptimized = Unoptimized(self._progress, investigator.add, model)
        self._due: dict[str, float] = {}
        self._ask_at = 0.0
        self._look: Any = None
        self._kind = ""
        self._trained: int | None = None
        self._changes = 0
        self._budget = sender.config.overhead_budget_pct / 100.0

    def poll(self) -> float:
        """Called a few times a second on the sender's thread. Returns the time (of its clock) before which
        nothing is due."""
        self._tell_loss()
        unoptimized_due = self._unoptimized.poll()
        if self._look is not None:
            self._finish_look()
        elif (
            self._clock() >= self._ask_at
            and not self._progress.links.ended
            and self._progress.completed - self._begin >= FIRST_STEPS
        ):
            self._begin_look()
        return min(self._ask_at, unoptimized_due)

    def close(self) -> None:
        """Ends a running measurement when the run ends. On the training thread, or the thread that ends the run."""
        self._tell_loss()
        self._unoptimized.close()
        if self._look is not None:
            self._look.close()

    def _tell_loss(self) -> None:
        """What the loss of the first step was made of (loss_function.py)."""
        made = self._progress.losses.loss_made
        if made:
            self._progress.losses.loss_made = {}
            self._sender.event("loss", made, step=self._progress.completed)

    def _begin_look(self) -> None:
        began = self._cpu()
        self._notice_what_is_trained()
        asking_s = self._cpu() - began
        for kind, make in (("flops", self._count), ("modules", self._time_modules), ("lines", self._find_lines)):
            if self._clock() >= self._due.get(kind, 0.0):
                self._look, self._kind = make(), kind
                if self._look is not None:
                    self._investigator.add(self._look)
                    return
        self._ask_at = self._clock() + min(IDLEST_S, max(IDLE_S, asking_s / _SHARE_OF_CORE))

    def _notice_what_is_trained(self) -> None:
        """Counts a step's operations again if layers were frozen or unfrozen, or another model is trained."""
        trained = _trained(self._progress)
        if trained is None or trained == self._trained:
            return
        if self._trained is not None:
            self.flops.forget()
            self._changes += 1
            if self._changes > MOST_SIZES:
                self._due["flops"] = self._clock() + LEAST_S
        self._trained = trained

    def _count(self) -> Any:
        self.flops.look = FlopCount(self._progress) if self.flops.wants() else None
        return self.flops.look

    def _time_modules(self) -> Any:
        model = self._model()
        times = ModuleTimes(self._progress, model) if model is not None else None
        if times is None or times.over:
            self._due["modules"] = self._clock() + LEAST_S
            return None
        return times

    def _find_lines(self) -> Any:
        on_cuda = self._device() is not None and accelerator().kind == "cuda"
        return SynchronizingLines(self._progress) if on_cuda else ValueReads(self._progress)

    def _finish_look(self) -> None:
        look = self._look
        if not look.over:
            return
        if self._kind == "modules" and not look.ready():
            return
        if (
            self._kind == "flops"
            and look.step
            and not self.flops.has_seen(look.step)
            and not self._progress.links.ended
        ):
            return
        self._look = None
        self._progress.costs.hooks_ns += look.cost_ns
        if self._kind != "flops":
            self._due[self._kind] = self._clock() + max(LEAST_S, look.cost_ns / 1e9 / (_SHARE_OF_BUDGET * self._budget))
        if not look.step:
            return  # something else was going on: try again
        if self._kind == "flops":
            self.flops.take(look, self._model())
        elif self._kind == "modules":
            self._tell(look.step, look.shares())
        else:
            self._tell(look.step, look.values())
            if look.lines:
                self._sender.event("sync", {"lines": look.told()}, step=look.step)

    def _tell(self, step: int, values: dict[str, float]) -> None:
        if values:
            self._progress.rows.append((step, time.time(), time.monotonic(), tuple(values), [*values.values()]))


def _trained(p: StepState) -> int | None:
    """Returns a number for the set of trained parameters, another one for another set. 20 µs for 300 of them."""
    optimizer = p.selection.primary
    if optimizer is None:
        return None
    return hash(
        tuple([id(one) for group in [*optimizer.param_groups] for one in [*group["params"]] if one.requires_grad])
    )
