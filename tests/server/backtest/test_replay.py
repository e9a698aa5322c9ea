"""A run that is over, judged as the server would have judged it live."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from judging import START, state

from perfagent.wire import Event, Finding, Group
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import BacktestAlert, Judged, replay
from perfagent_server.backtest.reported import Reported, in_order_of_time
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.life.hang import Hang
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series
from perfagent_server.rules.speed.straggler import Straggler
from perfagent_server.rules.texts import Text
from perfagent_server.rules.window import Window

NAN = float("nan")
TEXT = Text(name="n", meaning="m", fires="f", title="t", message="{word} at {at}", remedy="r")


@dataclass(frozen=True, kw_only=True)
class HighLoss(Rule):
    """Fires where the loss is above 1, and says that it began two steps before."""

    raises: bool = False

    id: ClassVar[str] = "high_loss"
    severities = ("warning", "critical")
    question = Question.DOES_IT_LEARN
    reads = (Series("loss", judged=True), Series("step_time_s", merge="median"))
    life = Life(clear_steps=3)
    own_text = TEXT

    def judge(self, window: Window) -> Finding | None:
        if self.raises:
            raise RuntimeError("broken")
        loss, took = window.value("loss"), window.series("step_time_s")
        if loss is None or loss <= 1:
            return None
        assert took is None or took.step == window.at, "it must not see a step that had not ended"
        severity = "critical" if loss > 9 else "warning"
        return self.found(severity, since_step=window.at - 2, evidence={"word": severity, "at": window.at})


@dataclass(frozen=True, kw_only=True)
class Clocked(Rule):
    """Counts how often the clock had it judged."""

    after_s: float = 100.0

    id: ClassVar[str] = "clocked"
    severities = ("info",)
    question = Question.IS_IT_FAST
    reads = (Every(5.0), Series("loss"))
    life = Life(clear_s=1e9)
    own_text = TEXT

    def judge(self, window: Window) -> Finding | None:
        state = window.state_of(self, {"times": []})
        state["times"].append(window.now)
        late = window.now - START >= self.after_s
        return self.found("info", evidence={"word": "late", "at": len(state["times"])}) if late else None


def curve(losses: Iterable[float], *, first: int = 1, every_s: float = 1.0) -> list[Moment]:
    return [
        Moment(START + every_s * at, first + at, {"loss": loss, "step_time_s": every_s})
        for at, loss in enumerate(losses)
    ]


def judged(moments: Iterable[Moment], *rules: Rule) -> Judged:
    return replay(moments, Plan(rules or all_rules()))


def test_alert_has_its_onset_firing_step_and_last_step() -> None:
    found = judged(curve([0.5] * 10 + [2.0] * 4 + [0.5] * 10), HighLoss())
    assert (found.steps, found.failed) == (24, {})
    assert found.alerts == [BacktestAlert("high_loss", "warning", 9, 11, 14, "warning at 11")]


def test_an_alert_that_opens_again_is_the_same_one_at_its_worst() -> None:
    losses = [0.5] * 10 + [2.0] + [0.5] * 20 + [2.0, 20.0] + [0.5] * 9
    [alert] = judged(curve(losses), HighLoss()).alerts
    assert (alert.severity, alert.first_step, alert.last_step) == ("critical", 11, 33)


def test_clock_passes_with_the_samples_that_are_judged() -> None:
    [alert] = judged(curve([0.5] * 30, every_s=7.0), Clocked()).alerts
    assert alert.message == "late at 20"  # at 5, 10 ... 100 s
    assert alert.first_step == alert.onset_step == 15, "the newest step that had ended after 100 s"


def test_hang_is_found_before_its_pause_and_a_short_one_is_none() -> None:
    moments = curve([1.0] * 40)
    late = [Moment(one.time + 300.0, one.step + 40, one.values) for one in moments]
    [alert] = judged([*moments, *late], Hang()).alerts
    assert (alert.rule, alert.first_step) == ("hang", 40)
    soon = [Moment(one.time + 70.0, one.step + 40, one.values) for one in moments]
    assert judged([*moments, *soon], Hang()).alerts == []


def test_a_rule_that_fails_is_passed_over_and_told() -> None:
    found = judged(curve([2.0] * 5), HighLoss(raises=True), Clocked())
    assert found.steps == 5
    assert [*map(str, found.failed.values())] == ["broken"]
    assert list(found.failed) == ["a judgment by high_loss"]


def test_restart_ends_alerts_and_what_follows_is_judged_anew() -> None:
    def begins(attempt: int, at: float, step: int) -> Moment:
        event = Event(kind="state", time=at, data={"state": "running", "start_step": step})
        return Moment(at, events=(event,), attempt=attempt)

    first = [begins(1, START, 0), *curve([0.5] * 5 + [2.0] * 5)]
    second = [Moment(START + 20 + at, 8 + at, {"loss": 2.0}, attempt=2) for at in range(3)]
    found = judged([*first, begins(2, START + 19, 8), *second], HighLoss())
    assert [(one.first_step, one.last_step) for one in found.alerts] == [(6, 10), (8, 10)]
    assert found.steps == 10


def of_rank(rank: int, *, slow: float = 0.0, steps: int = 120, step_s: float = 1.0) -> Reported:
    """One process of four: in the same step times, one computes longer and the others wait."""
    own = 0.6 + slow
    times = [START + step_s * step for step in range(1, steps + 1)]
    values = {"step_time_s": [step_s] * steps, "phase/forward_s": [own] * steps, "phase/comm_s": [step_s - own] * steps}
    group = Group(list(range(1, steps + 1)), times, times, values)
    started = state("starting", world_size=4)
    return Reported(1, rank, [group], [Event(kind="state", time=START, data=started.data)])


def test_ranks_are_judged_side_by_side() -> None:
    found = judged(in_order_of_time([of_rank(rank, slow=0.35 * (rank == 2)) for rank in range(4)]), Straggler())
    [alert] = found.alerts
    assert alert.ranks == (2,)
    assert alert.first_step >= 16
    assert found.steps == 120


def test_a_gradient_waits_for_a_scaler_that_speaks_a_step_later() -> None:
    steady = {"amp/scale": 1024.0, "amp/skipped": 0.0, "grad/norm": 1.0, "grad/nonfinite": 0.0}
    moments = [Moment(START + step, step, {"loss": 1.0, **steady}) for step in range(1, 60) if step != 51]
    moments.insert(50, Moment(START + 51, 51, {"grad/norm": NAN, "grad/nonfinite": 3.0}))
    [alert] = replay(moments, Plan(all_rules())).alerts
    assert (alert.rule, alert.onset_step, alert.first_step) == ("nonfinite_gradient", 51, 52)
