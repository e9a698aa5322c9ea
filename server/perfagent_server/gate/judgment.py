"""Decides whether the new run is slower, sicker or fine, or whether the gate cannot tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import worse
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import BacktestAlert
from perfagent_server.gate.timing import LEAST_ROUNDS, Difference, Grown, culprit
from perfagent_server.gate.turns import Job
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import Question

__all__ = ["CANNOT_TELL", "FINE", "WORSE", "Judgment", "as_if_never_stopped", "judge", "new_findings"]

FINE, WORSE, CANNOT_TELL = 0, 1, 3


@dataclass(frozen=True, slots=True)
class Judgment:
    """speed: slower, same or unknown; by: which of `times` says so, one of TIMES. why: of an unknown speed. phase: the one that
    grew. steps: how many of each were judged. sicker: findings at warning or above that the base has not; slow_rules: new ones
    that are about speed, which the interval judges. broken: a side that did not end well, in words; base_broken: that it is the
    base."""

    speed: str
    by: str
    why: str
    times: list[Difference]
    phase: str
    phases: list[Grown]
    steps: tuple[int, int] = (0, 0)
    sicker: list[Finding] = field(default_factory=list)
    slow_rules: list[Finding] = field(default_factory=list)
    broken: str = ""
    base_broken: bool = False

    @property
    def exit_code(self) -> int:
        if self.base_broken:
            return CANNOT_TELL
        if self.sicker or self.broken or self.speed == "slower":
            return WORSE
        return CANNOT_TELL if self.speed == "unknown" else FINE


def judge(
    differences: Sequence[Difference], phases: list[Grown], threshold: float, untimed: Sequence[str] = ()
) -> Judgment:
    """Only the speed. threshold: such as 0.03; untimed: BASE, NEW or both, where not one step of it is known.

    Slower is an estimate of at least the threshold whose interval leaves 0 out; the same is one below it, whose interval either
    ends below it too or is at most two thresholds wide. Where the wall time can say neither, because the machine is busy, the
    time without queueing for a processor may; and where that cannot, the processor time may say slower, but not the same: it
    does not see waits.
    """
    words = {one.what: _word(one, threshold) for one in differences}
    by = next((what for what, word in words.items() if word == "slower" or (word == "same" and what != "cpu")), "wall")
    speed = words[by]
    why = _doubt(differences[0], threshold, untimed, is_paired=len(differences) > 1) if speed == "unknown" else ""
    return Judgment(speed, by, why, list(differences), culprit(phases) if speed == "slower" else "", phases)


def _word(one: Difference, threshold: float) -> str:
    if one.value is None:
        return "unknown"
    if one.value >= 1 + threshold and one.low > 1:
        return "slower"
    is_sure = one.high < 1 + threshold or (one.value < 1 + threshold and one.high - one.low <= 2 * threshold)
    return "same" if is_sure else "unknown"


def _doubt(wall: Difference, threshold: float, untimed: Sequence[str], *, is_paired: bool) -> str:
    if untimed:
        seen = "was seen: one ends with optimizer.step()" if is_paired else "has a time (`step_time_s`)"
        return f"no step of {' and '.join(untimed)} {seen}"
    if wall.value is None and is_paired:
        return f"{wall.count} rounds of blocks (A B B A) with steps were measured; at least {LEAST_ROUNDS} are needed"
    if wall.value is None:
        return f"the shorter run has {wall.count} steps after the warm-up, or its slow steps come in groups: record longer runs"
    return (
        f"the interval, {_percent(wall.low)} to {_percent(wall.high)}, is too wide to tell no difference from one of "
        f"{_percent(1 + threshold)}: let the commands train longer, or on a quieter machine"
    )


def _percent(factor: float) -> str:
    return f"{100 * (factor - 1):+.1f} %"


def new_findings(
    base: Sequence[BacktestAlert], new: Sequence[BacktestAlert], plan: Plan
) -> tuple[list[Finding], list[Finding]]:
    """Findings at warning or above by rules that found remarks at most in the base, the worst of each rule: those that make a run
    sick, and those that say it is slow."""
    known = {one.rule for one in base if one.severity != "info"}
    worst: dict[str, Finding] = {}
    for alert in new:
        if alert.severity == "info" or alert.rule in known or alert.fired is None:
            continue
        before = worst.get(alert.rule)
        if before is None or worse(alert.severity, before.severity):
            worst[alert.rule] = replace(alert.fired, severity=alert.severity)
    about_speed = {rule.id for rule in plan.rules.values() if rule.question is Question.IS_IT_FAST}
    sick = [one for rule, one in worst.items() if rule not in about_speed]
    return sick, [one for rule, one in worst.items() if rule in about_speed]


def as_if_never_stopped(moments: Iterable[Moment], job: Job) -> Iterator[Moment]:
    """The rules shall not see the pauses: the clock stands still in them, and a step that was stopped has no length. What came
    after the end of the last block was the gate's own doing."""
    first, last = job.blocks[0].begin, job.blocks[-1].end
    for moment in moments:
        if moment.time > last and job.exit_code is None:
            return
        trained = job.training_s(moment.time)
        values = moment.values
        length = values.get("step_time_s")
        if length is not None and trained - job.training_s(moment.time - length) < length - _SLACK_S:
            values = {name: value for name, value in values.items() if not _is_timing(name)}
        yield replace(moment, time=first + trained + max(0.0, moment.time - last), values=values)


_SLACK_S = 0.002


def _is_timing(name: str) -> bool:
    return name == "step_time_s" or name.startswith("phase/") or name.endswith("_per_s")
