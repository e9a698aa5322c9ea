"""Schedules the measurements of gradients and weights: passes in the steps that the governor allows.

A pass takes the norm of every gradient. Every DEEPER-th pass also compares the weights before and after the step
(updates.py), including those of other optimizers on the same backward pass, and in the following step looks for dead
units (dead_units.py).

In a job of several ranks, the passes fall on the same steps on each rank, as far as their periods allow: periods there
are powers of two, counted from step 0, so that the server can combine ranks although no rank communicates with another.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, TypeVar

from perfagent.device import Value, ran_out_of_memory, tolerating_out_of_memory
from perfagent.measure.dead_units import DeadUnits
from perfagent.measure.gradients import Plan, bad_on_host, count_nonfinite, norms, parameters_of
from perfagent.measure.updates import Weights
from perfagent.step.costs import report_ns
from perfagent.step.gradients import DeadShares, GradientNorms, PassTime, WeightChanges
from perfagent.step.trace import BACKWARD, entries_of

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

    from perfagent.step.state import StepState

__all__ = ["DEEPER", "GradientSchedule"]

DEEPER = 16
_MOST_PLANS = 256
_MOST_LAYERS = 256
_WITHOUT_ROOM = 1000
"""Steps without a pass after the device had no memory for one: at each failed allocation torch frees its whole cache
and waits for the device."""
_gradient = operator.attrgetter("grad")


Found = TypeVar("Found")


class GradientSchedule:
    """The measurements of one run. deeper: every how many passes the deeper measurements run. passes: so far."""

    __slots__ = (
        "_cost_ns", "_extra_ns", "_plan", "_plans", "_probe", "_progress", "_weights", "deeper", "passes",
    )  # fmt: skip

    def __init__(self, progress: StepState) -> None:
        self._progress = progress
        self.deeper = DEEPER
        self._plans: dict[int, Plan] = {}  # by id of the optimizer
        self._plan: Plan | None = None  # of the newest pass
        self._weights: Weights | None = None
        self.passes = self._cost_ns = 0
        self._extra_ns = 0  # cost of all but the pass itself, since the period was set
        self._probe: DeadUnits | None = None

    def measure(self, optimizer: Optimizer, *, after: bool = False) -> None:
        """Measures the gradients that an optimizer is about to use. after: it has used them (through a closure)."""
        try:
            self._measure(optimizer, after=after)
        except RuntimeError as error:  # must not turn off the calling hook, which counts the steps
            if not ran_out_of_memory(error):
                raise
            self._progress.measure_at = self._progress.completed + _WITHOUT_ROOM
            self._progress.measured.planned_ns = 0.0  # so that `come_back` does not shorten the wait

    def _measure(self, optimizer: Optimizer, *, after: bool) -> None:
        p, started = self._progress, perf_counter_ns()
        parameters = parameters_of(optimizer)
        plan = self._plan = self._plan_of(optimizer, parameters)
        gradients = list(map(_gradient, parameters))
        begin = None if p.clock is None else p.clock.mark()
        p.gradients = found = norms(gradients, plan)
        is_bad = found is not None and self._is_news()
        if found is not None and (p.measured.suspects or is_bad):
            count_nonfinite(found, gradients, p.measured.suspects or bad_on_host(found))
            p.measured.suspects = ()
        end = None if p.clock is None else p.clock.mark()
        cost = perf_counter_ns() - started
        self._count(cost)
        if found is not None and p.clock is not None and begin is not None and end is not None:
            p.measured.deferred.append(PassTime(begin, end, cost))
        if found is not None and not after and not is_bad and self.passes % self.deeper == 1 % self.deeper:
            self._weights = self._counted(perf_counter_ns(), Weights(parameters, plan))
        self.passes += 1

    def _is_news(self) -> bool:
        """Whether the loss is no number, and not for the same reason as before: only then are bad numbers counted, which
        takes several times as long as a pass."""
        p = self._progress
        if p.links.investigator.stays_bad(p.completed + 1):
            return False
        losses = (entry[3] for entry in entries_of(p.trace) if entry[0] == BACKWARD)
        return any(isinstance(loss, float) and not math.isfinite(loss) for loss in losses)

    def measure_pieces(
        self, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], model: nn.Module, carried: Value | None
    ) -> None:
        """Measures gradients of which this rank holds shards (ZeRO). carried: the loss scale in them."""
        p, started = self._progress, perf_counter_ns()
        plan = self._plan
        if plan is None or not plan.fits([parameter for parameter, _ in pieces]):
            plan = self._plan = Plan.of_pieces(pieces, model)
        p.gradients, p.amp.grad_scale = norms([piece for _, piece in pieces], plan), carried
        self.passes += 1
        self._count(perf_counter_ns() - started)

    def _count(self, cost: int) -> None:
        self._progress.costs.pass_ns += cost
        self._cost_ns = min(cost, 2 * self._cost_ns) if self._cost_ns else cost  # limits a preempted pass

    # ---- other optimizers on the same backward pass

    def measure_other(self, optimizer: Optimizer) -> GradientNorms | None:
        started, parameters = perf_counter_ns(), parameters_of(optimizer)
        return self._counted(started, norms(map(_gradient, parameters), self._plan_of(optimizer, parameters)))

    def compares(self) -> bool:
        """True if the weights are compared before and after the step in progress, if its gradients are measured."""
        is_due = self._progress.gradients is None and self.passes % self.deeper == 1 % self.deeper
        return self._weights is not None or is_due

    def keep_other(self, optimizer: Optimizer) -> Weights:
        """Copies the weights that another optimizer is about to change."""
        started, parameters = perf_counter_ns(), parameters_of(optimizer)
        return self._counted(started, Weights(parameters, self._plan_of(optimizer, parameters)))

    def compare_other(self, optimizer: Optimizer, kept: Weights) -> WeightChanges | None:
        """Measures how far another optimizer has moved its weights."""
        return self._counted(perf_counter_ns(), kept.compare(parameters_of(optimizer)))

    def _plan_of(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Plan:
        plan = self._plans.get(id(optimizer))
        if plan is None or not plan.fits(parameters):
            if len(self._plans) >= _MOST_PLANS:  # optimizers that come and go
                self._plans.clear()
            plan = self._plans[id(optimizer)] = Plan.of(optimizer, self._progress.selection.model)
        return plan

    def _counted(self, started: int, found: Found) -> Found:
        """Adds the time since then to the cost of the pass."""
        cost = perf_counter_ns() - started
        self._progress.costs.pass_ns += cost
        self._extra_ns += cost
        return found

    # ---- between passes

    def finish(self, optimizer: Optimizer, step_ns: int) -> None:
        """Ends a pass after the optimizer's step: compares the weights and plans the next pass."""
        p, started = self._progress, perf_counter_ns()
        plan, model = self._plan, p.selection.model
        if self._probe is not None and self._probe.cost_ns:  # it ran since the last pass
            self._counted(started - self._probe.cost_ns, None)
            self._probe = None
        kept, self._weights = self._weights, None
        if kept is not None:
            with tolerating_out_of_memory():
                p.measured.moved = kept.compare(parameters_of(optimizer))
            if model is not None:
                self._probe_dead_units(model)
            self._counted(started, None)
        extra, self._extra_ns = self._extra_ns, 0
        reporting = report_ns(min(len(plan.names), _MOST_LAYERS) if plan is not None else 1)
        p.costs.report_ns += reporting
        p.measured.planned_ns = self._cost_ns + p.measured.beyond_ns + extra + reporting
        p.measured.aligned = plan is not None and plan.world > 1
        p.measure_at = p.plan_pass(p.completed, step_ns)

    def found_model(self) -> None:
        """The trained model is known now: parameters measured without it get their names in the next pass."""
        self._plans.clear()

    def _probe_dead_units(self, model: nn.Module) -> None:
        p = self._progress
        if p.probe is not None:
            return  # somebody else uses that call

        def done(shares: DeadShares) -> None:
            p.measured.deferred.append(shares)
            p.unusual = True

        probe = DeadUnits(model, done)
        if probe:
            p.probe = self._probe = probe
