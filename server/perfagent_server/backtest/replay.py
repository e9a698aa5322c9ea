"""Judges a run that is over as the server would have judged it live: the same Evaluator, and a clock that passes with
the times of the samples.

Each moment is a frame of its own, so that no rule sees a step that had not ended when it was judged. Between two
moments the clock goes on, and rules that are judged by the clock are. Nothing is known of when the sender was silent, so
`lost_contact` is never found.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from perfagent.wire import Finding, Severity
from perfagent_server.alerts.state_machine import RUN_ENDED, Change, Machine, worse
from perfagent_server.backtest.moment import Moment
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.plan import Plan

__all__ = ["BacktestAlert", "Judged", "replay"]

_LEAST_S = 0.001
"""The clock never stands still: what is due at a moment may be due just after it."""


@dataclass(frozen=True, slots=True)
class BacktestAlert:
    """onset_step: where the trouble began; first_step: at which the alert fired; last_step: the last at which the rule
    still found it; ranks: that it is about; fired: the finding with which it fired; to_the_end: it was open when the run
    ended."""

    rule: str
    severity: Severity
    onset_step: int
    first_step: int
    last_step: int
    message: str
    ranks: tuple[int, ...] = ()
    fired: Finding | None = field(default=None, compare=False, repr=False)
    to_the_end: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Judged:
    """steps: how many were judged; failed: what raised an error, as "a judgment by loss_spike", and the first of each;
    verdict: of the whole."""

    steps: int
    alerts: list[BacktestAlert]
    failed: dict[str, Exception]
    verdict: Finding


@dataclass(slots=True)
class _Open:
    """An alert so far. machine: what keeps its life; None once it is over. to_the_end: nothing but the run's end ended it."""

    finding: Finding
    severity: Severity
    first_step: int
    last_step: int
    machine: Machine | None
    fired: Finding
    to_the_end: bool = True

    def settle(self) -> None:
        if self.machine is not None:
            self.last_step = max(self.last_step, self.machine.hit_step)
            self.machine = None

    def told(self) -> BacktestAlert:
        onset, first = self.finding.since_step, self.first_step
        return BacktestAlert(
            rule=self.finding.rule,
            severity=self.severity,
            onset_step=first if onset is None else min(onset, first),
            first_step=first,
            last_step=self.last_step,
            message=self.finding.message,
            ranks=tuple(self.finding.ranks),
            fired=self.fired,
            to_the_end=self.to_the_end,
        )


def replay(moments: Iterable[Moment], plan: Plan) -> Judged:
    """moments: in the order of their times."""
    return _Replay(plan).run(moments)


class _Replay:
    def __init__(self, plan: Plan) -> None:
        self._failed: dict[str, Exception] = {}
        self._judge = Evaluator("backtest", plan, on_failure=self._note_failure)
        self._steps: set[int] = set()
        self._alerts: dict[str, _Open] = {}
        self._number = 0

    def run(self, moments: Iterable[Moment]) -> Judged:
        for moment in moments:
            self._take(moment)
        for alert in self._alerts.values():
            alert.settle()
        alerts = [alert.told() for alert in self._alerts.values()]
        return Judged(len(self._steps), alerts, self._failed, self._judge.verdict())

    def _take(self, moment: Moment) -> None:
        judge = self._judge
        if self._number == 0:
            judge.start_clock(moment.time)
        self._let_time_pass(moment.time)
        self._number += 1
        self._note(judge.take(moment.frame(self._number, max(moment.time, judge.window.now))))
        columns = judge.plan.columns(tuple(moment.values))
        if columns.merged or columns.named_losses or columns.own or columns.step_time is not None:
            self._steps.add(moment.step)

    def _note_failure(self, what: str, error: Exception) -> None:
        self._failed.setdefault(what, error)

    def _let_time_pass(self, until: float) -> None:
        judge = self._judge
        while (due := judge.due()) is not None and due <= until:
            self._note(judge.tick(max(due, judge.window.now + _LEAST_S)))

    def _note(self, changes: Iterable[Change]) -> None:
        for change in changes:
            known = self._alerts.get(change.alert)
            if known is None:
                # The newest step that any rank has told of: what fires later for an older one was not known before.
                fired = max(change.step, self._judge.window.step)
                known = _Open(change.finding, change.finding.severity, fired, fired, None, change.finding)
                self._alerts[change.alert] = known
            known.finding = change.finding
            if worse(change.finding.severity, known.severity):
                known.severity = change.finding.severity
            known.to_the_end = change.kind != "resolve" or change.why.startswith(RUN_ENDED)
            if change.kind == "resolve":
                known.settle()
            else:
                known.machine = self._machine(change.alert)

    def _machine(self, alert: str) -> Machine | None:
        machines = self._judge.machines.values()
        return next((one for one in machines if one.alert == alert and not one.absorbed), None)
