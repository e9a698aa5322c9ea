"""Diagnoses a run: its verdict, all findings, and the rules that had no data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from perfagent.wire import Finding
from perfagent_client.history.old_run import OldRun
from perfagent_client.importing.attempts import loss_of
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import BacktestAlert, Judged, replay
from perfagent_server.diagnosis import hindsight
from perfagent_server.diagnosis.moments import curves, moments, parts_of_loss
from perfagent_server.rules.own_alert import OwnAlert
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import EVALUATION_LOSS, Events, Every, Rule, Series
from perfagent_server.rules.texts import said
from perfagent_server.verdict.verdict import worst_first

__all__ = ["Diagnosis", "diagnose", "of_moments"]

Outcome = Literal["finding", "nothing found", "could not judge"]
_FEWEST_LOSSES = 20
_GRADIENT = "nonfinite_gradient"
_EXCUSED = "gradients that are NaN or infinite (a GradScaler may have skipped their steps: the loss went on as before)"
_SUBJECTS = {
    "loss": "the loss",
    "data": "batches and labels",
    "model": "gradients and updates of single layers",
    "memory": "memory, disks and checkpoints",
    "speed": "where the time of a step goes, and use of the GPU",
    "hardware": "errors of GPUs and links",
    "life": "hangs and lost ranks",
}
"""By the folder of a rule."""


@dataclass(slots=True)
class Diagnosis:
    """alerts: what was found, as it came; unjudged: subject -> the rules that had no data."""

    name: str
    steps: int
    verdict: Finding
    alerts: list[BacktestAlert]
    failed: dict[str, Exception]
    unjudged: dict[str, list[str]] = field(default_factory=dict)
    format: str = ""
    path: str = ""
    source: str = ""
    left_out: list[str] = field(default_factory=list)
    has_data: bool = True

    @property
    def outcome(self) -> Outcome:
        is_ill = self.verdict.rule != "healthy" and self.verdict.cause != "preempted"
        if is_ill or any(one.severity != "info" for one in self.alerts):
            return "finding"
        return "nothing found" if self.has_data and not self.failed else "could not judge"


def of_moments(name: str, told: Iterable[Moment], plan: Plan) -> Diagnosis:
    """Of a run whose agent reported all that there is."""
    seen: set[str] = set()
    judged = replay(_noting(told, seen), plan)
    return _diagnosis(name, judged, plan, seen)


def diagnose(run: OldRun, plan: Plan) -> Diagnosis:
    seen: set[str] = set()
    if run.processes:
        judged = replay(_noting(moments(run, plan), seen), plan)
    else:
        judged, plan = _with_hindsight(run, plan, seen)
    found = _diagnosis(run.name, judged, plan, seen)
    if not found.steps:
        found.verdict = _without_step(found.verdict, plan)
    found.source, found.left_out = run.source, run.left_out
    if not run.processes:
        losses = loss_of(series := curves(run))
        found.has_data = losses is not None and len(series[losses]) >= _FEWEST_LOSSES
        if summands := parts_of_loss(run):
            _say_sum(found, summands, plan)
        if _GRADIENT not in plan.rules and "grad/norm" in series:
            found.unjudged[_EXCUSED] = [_GRADIENT]
    return found


def _without_step(finding: Finding, plan: Plan) -> Finding:
    """Of a file that tells of no step, nothing is said of one."""
    rule = plan.rules.get(finding.rule)
    if rule is None or not finding.evidence:
        return finding
    figures = {**finding.evidence, "step": None}
    words = said(rule.text(), finding.cause, figures)
    return replace(finding, title=words.title, message=words.message, since_step=None, evidence=figures)


def _say_sum(found: Diagnosis, summands: list[str], plan: Plan) -> None:
    """Says with all that is said of the loss what it is."""
    *first, last = summands
    said = f" The loss is the sum of {', '.join(first)} and {last}."

    def told(finding: Finding) -> Finding:
        made = replace(finding, evidence={**finding.evidence, "loss_parts": summands})
        made.message = finding.message + said  # afterwards: a healthy verdict makes its own
        return made

    about = {rule.id for rule in plan.rules.values() if _folder(rule) == "loss"}
    if found.verdict.rule in about or found.verdict.rule == "healthy":
        found.verdict = told(found.verdict)
    found.alerts = [
        replace(alert, message=alert.message + said, fired=alert.fired and told(alert.fired))
        if alert.rule in about
        else alert
        for alert in found.alerts
    ]


def _folder(rule: Rule) -> str:
    return type(rule).__module__.split(".")[-2]


def _diagnosis(name: str, judged: Judged, plan: Plan, seen: set[str]) -> Diagnosis:
    return Diagnosis(name, judged.steps, judged.verdict, judged.alerts, judged.failed, _unjudged(plan, seen))


def _noting(told: Iterable[Moment], seen: set[str]) -> Iterable[Moment]:
    """seen: gets the names of all series, and the kinds of events with a colon behind them."""
    for moment in told:
        seen.update(moment.values)
        seen.update(f"{event.kind}:" for event in moment.events)
        yield moment


# ---- what could not be judged


def _unjudged(plan: Plan, seen: set[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rule in plan.rules.values():
        if not isinstance(rule, OwnAlert) and not any(_has(one, plan, seen) for one in _needed(rule)):
            found.setdefault(_SUBJECTS.get(_folder(rule), _folder(rule)), []).append(rule.id)
    return found


def _needed(rule: Rule) -> list[Series | Events]:
    """What it is judged on; of a rule that is judged by the clock alone, all that it reads."""
    inputs = [one for one in rule.reads if not isinstance(one, Every)]
    return [one for one in inputs if isinstance(one, Events) or one.judged] or inputs


def _has(one: Series | Events, plan: Plan, seen: set[str]) -> bool:
    if isinstance(one, Events):
        return f"{one.kind}:" in seen
    if one.name == EVALUATION_LOSS:
        return any(plan.is_evaluation(name) for name in seen)
    if one.name == "loss":
        return loss_of(dict.fromkeys(seen)) is not None  # type: ignore[arg-type]
    return any(name.startswith(one.name) for name in seen) if one.is_family else one.name in seen


# ---- with hindsight


def _with_hindsight(run: OldRun, plan: Plan, seen: set[str]) -> tuple[Judged, Plan]:
    """What was found, and the plan by which."""
    series = curves(run)
    excused = {_GRADIENT} if hindsight.are_gradients_excused(series) else set()
    plan = Plan([rule for rule in plan.rules.values() if rule.id not in excused]) if excused else plan
    judged = replay(_noting(moments(run, plan), seen), plan)
    known = {one.rule for one in judged.alerts if one.severity != "info"}
    late = [one for one in hindsight.findings(series) if one.rule in plan.rules and one.rule not in known]
    last = max((samples.step[-1] for samples in series.values() if len(samples)), default=0)
    told = [
        BacktestAlert(one.rule, one.severity, one.since_step or 0, last, last, one.message, (0,), one, to_the_end=True)
        for one in late
    ]
    alerts = judged.alerts + told
    return replace(judged, alerts=alerts, verdict=_verdict(judged, alerts, plan)), plan


def _verdict(judged: Judged, alerts: list[BacktestAlert], plan: Plan) -> Finding:
    """The worst of all that was found, also of what was over at the end."""
    own = judged.verdict
    bad = [one.fired for one in alerts if one.severity != "info" and one.fired is not None]
    candidates = [one for one in (own, *bad) if one.rule != "healthy"]
    worst = next(iter(worst_first(candidates, plan.rules)), own)
    return own if worst.rule == own.rule else worst
