"""Faults that are put into recorded runs, each at a random place, and whether the rule that must name it does.

A fault changes the moments of a real run from one step on. It counts as found when the alert of its rule fires in that
step or in one of the `within` steps after it. An alert before that step is a false one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from records import Record, begin_at

from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import BacktestAlert, replay
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import Rule

__all__ = ["FAULTS", "Fault", "Outcome", "counts", "try_out"]

Change = Callable[[Mapping[str, float], int, Sequence[Moment]], Mapping[str, float]]
"""(values of a step, how many steps after the fault began, the steps before it) -> the values with the fault."""
_DECAY_STEPS = 15.0
_RAMP_STEPS = 300
_FLAT_STEPS = 200
_MARGIN = 50
"""Real steps that are judged after the last one at which the fault may be found."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """name: in words; rule: that must name it; needs: series that the run must log; history: steps before it that are
    judged, at most; least: fewest of them; pause_s: how long the run stands still just before that step: the alert then
    fires at the step before; draws: how many are tried in each group of families; is_remark: the rule makes a remark of it."""

    name: str
    rule: str
    within: int
    needs: tuple[str, ...]
    change: Change = lambda values, _age, _before: values
    history: int = 1300
    least: int = 220
    pause_s: float = 0.0
    draws: int = 100
    is_remark: bool = False


@dataclass(slots=True)
class Outcome:
    """latencies: after how many steps each that was found; early: alerts before the fault."""

    total: int = 0
    latencies: list[int] = field(default_factory=list)
    early: int = 0

    @property
    def found(self) -> int:
        return len(self.latencies)


def try_out(fault: Fault, records: Sequence[Record], draws: int) -> Outcome:
    """The fault at random places of the runs that are long enough and log what it needs; the same places each time."""
    rules = {rule.id: rule for rule in all_rules()}
    rule = rules[fault.rule]
    able = [one for one in records if {*fault.needs} <= one.series and _room(one, fault) > 0]
    draw = random.Random(f"{fault.name} {draws}")
    outcome = Outcome()
    for _ in range(draws if able else 0):
        record = draw.choice(able)
        place = fault.least + draw.randrange(_room(record, fault))
        _judge(fault, rule, record.moments, place, outcome)
    return outcome


def _room(record: Record, fault: Fault) -> int:
    """At how many places the fault can begin."""
    return len(record.moments) - fault.within - 1 - fault.least


def _judge(fault: Fault, rule: Rule, moments: Sequence[Moment], place: int, outcome: Outcome) -> None:
    before, after = moments[max(0, place - fault.history) : place], moments[place : place + fault.within + _MARGIN]
    run = begin_at(before) + [
        replace(
            moment, time=moment.time + fault.pause_s, values={**fault.change(moment.values, age, before)}, attempt=1
        )
        for age, moment in enumerate(after)
    ]
    onset = moments[place - 1 if fault.pause_s else place].step
    alerts = [one for one in replay(run, Plan((rule,))).alerts if fault.is_remark or counts(rule, one)]
    outcome.total += 1
    outcome.early += sum(one.first_step < onset for one in alerts)
    steps = [one.first_step - onset for one in alerts if one.first_step >= onset]
    if steps and min(steps) <= fault.within:
        outcome.latencies.append(min(steps))


def counts(rule: Rule, alert: BacktestAlert) -> bool:
    """Whether an alert counts for a rule: at warning or above, except for one that has only remarks."""
    return alert.rule == rule.id and (alert.severity != "info" or rule.severities == ("info",))


# ---- the faults


def _loss(add: Callable[[int], float]) -> Change:
    return lambda values, age, _: {**values, "loss": values["loss"] + add(age)} if "loss" in values else values


def _spike(form: str, nat: float) -> Change:
    return _loss(lambda age: nat * (math.exp(-age / _DECAY_STEPS) if form == "recover" else 1.0))


def _times(name: str, factor: Callable[[int], float]) -> Change:
    return lambda values, age, _: {**values, name: values[name] * factor(age)} if name in values else values


def _rate_too_high(values: Mapping[str, float], age: int, _before: Sequence[Moment]) -> Mapping[str, float]:
    """Ten times the learning rate, and what that does to the loss: 0.5 nat more within 30 steps."""
    return {**values, "lr": 10.0 * values["lr"], "loss": values["loss"] + 0.5 * min(1.0, age / 30)}


def _nan(values: Mapping[str, float], _age: int, _before: Sequence[Moment]) -> Mapping[str, float]:
    return {**values, "loss": math.nan}


def _bad_gradient(values: Mapping[str, float], _age: int, _before: Sequence[Moment]) -> Mapping[str, float]:
    return {**values, "grad/norm": math.nan, "grad/nonfinite": 3.0}


def _frozen(values: Mapping[str, float], _age: int, before: Sequence[Moment]) -> Mapping[str, float]:
    return {**values, "loss": before[-1].values["loss"]}


def _flat(values: Mapping[str, float], age: int, before: Sequence[Moment]) -> Mapping[str, float]:
    """The last losses again and again, in another order: noise without a trend."""
    return {**values, "loss": before[-1 - 73 * age % _FLAT_STEPS].values["loss"]}


def _collapse(values: Mapping[str, float], age: int, _: Sequence[Moment]) -> Mapping[str, float]:
    """What torch's scaler does when every step overflows."""
    scale, skipped = values["amp/scale"], values["amp/skipped"]
    return {**values, "amp/scale": scale / 2.0 ** (age + 1), "amp/skipped": skipped + age + 1}


_BLOOM = (0.947, 2.39, 15.886, 145.119, 960.351)
"""Gradient norms of the incident of BLOOM-176B, whose usual one was 0.2."""

FAULTS: tuple[Fault, ...] = (
    Fault(
        name="loss becomes NaN and stays so", rule="nonfinite_loss", within=1, needs=("loss",), change=_nan, history=60,
        least=1,
    ),
    Fault(
        name="gradients become NaN", rule="nonfinite_gradient", within=1, needs=("grad/norm",), change=_bad_gradient,
        history=60, least=1,
    ),
    *(
        Fault(
            name=f"loss jumps by {nat:g} nat and {'decays (15 steps)' if form == 'recover' else 'stays'}",
            rule="loss_spike", within=10, needs=("loss",), change=_spike(form, nat), draws=200 if nat < 1 else 50,
        )
        for form in ("recover", "stick")
        for nat in (0.5, 1.0, 3.0)
    ),
    *(
        Fault(
            name=f"loss climbs by {nat:g} nat over {_RAMP_STEPS} steps", rule="loss_divergence", within=400, needs=("loss",),
            change=_loss(lambda age, nat=nat: nat * min(1.0, age / _RAMP_STEPS)), least=600,  # type: ignore[misc]
        )
        for nat in (0.5, 2.0)
    ),
    Fault(
        name="loss stands still to the last digit", rule="frozen_training", within=120, needs=("loss",), change=_frozen,
        history=300,
    ),
    Fault(
        name="loss stays at its level, with its noise", rule="loss_plateau", within=2500, needs=("loss",), change=_flat,
        least=1000, draws=30, is_remark=True,
    ),
    Fault(
        name="gradients grow as in the incident of BLOOM-176B", rule="grad_norm_explosion", within=3, needs=("grad/norm",),
        change=_times("grad/norm", lambda age: _BLOOM[min(age, 4)] / 0.2), history=400,
    ),
    Fault(
        name="learning rate is ten times as high, and the loss climbs by 0.5 nat", rule="lr_anomaly", within=60,
        needs=("lr", "loss"), change=_rate_too_high, history=400,
    ),
    Fault(
        name="loss scale halves at every step", rule="loss_scale_collapse", within=10, needs=("amp/scale",),
        change=_collapse, history=400,
    ),
    Fault(
        name="steps take 5.7 % longer", rule="throughput_regression", within=20, needs=("step_time_s",),
        change=_times("step_time_s", lambda _: 1.057), history=600,
    ),
    Fault(
        name="steps take 10 % longer", rule="throughput_regression", within=20, needs=("step_time_s",),
        change=_times("step_time_s", lambda _: 1.1), history=600,
    ),
    Fault(
        name="every 40th step takes four times as long", rule="step_time_tail", within=1000, needs=("step_time_s",),
        change=_times("step_time_s", lambda age: 4.0 if age % 40 == 0 else 1.0), least=500,
    ),
    Fault(
        name="no step ends for 300 s", rule="hang", within=1, needs=("step_time_s",), pause_s=300.0, history=200, least=20,
    ),
)  # fmt: skip
