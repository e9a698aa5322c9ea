"""allocator_churn: page faults of the training thread beside the step time; and samples of the host that rules read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest
from judging import fired, frame, make_evaluator, restored

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.rule import Life, Place, Question, Rule, Series, Words
from perfagent_server.rules.speed.allocator_churn import AllocatorChurn
from perfagent_server.rules.window import Window


def train(
    *,
    faults: float | Sequence[float],
    kernel: float | None = 30.0,
    step_s: float = 0.006,
    utilization: float | None = None,
    pause_every: int = 0,
) -> list[Change]:
    """Two minutes of a run, with a reading every two seconds."""
    evaluator = make_evaluator(rules=(AllocatorChurn(),))
    changes: list[Change] = []
    each, count = int(2 / step_s), 60
    for number in range(count):
        steps = range(1 + each * number, 1 + each * (number + 1))
        took = [1.5 if pause_every and step % pause_every == 0 else step_s for step in steps]
        columns = {"step_time_s": took}
        if pause_every:
            columns["phase/eval_s"] = [1.4 if step % pause_every == 0 else 0.0 for step in steps]
        changes += evaluator.take(frame(columns, steps, ident=evaluator.upto + 1, step_s=step_s))
        told = {"process/page_faults_per_step": [faults if isinstance(faults, float) else faults[number]]}
        if kernel is not None:
            told["process/system_cpu_pct"] = [kernel]
        if utilization is not None:
            told["gpu/utilization_pct"] = [utilization]
        changes += evaluator.take(frame(told, [steps[-1]], ident=evaluator.upto + 1, step_s=step_s))
        if number % 7 == 3:
            evaluator = restored(evaluator)
    return changes


def only(changes: list[Change]) -> Change:
    [change] = fired(changes)
    return change


def test_faults_that_take_a_tenth_of_the_step_are_told() -> None:
    found = only(train(faults=1150.0, kernel=15.0)).finding
    assert (found.rule, found.severity) == ("allocator_churn", "info")
    assert found.title == "Page faults take 15 % of the step"
    assert "1,150 page faults (4.49 MiB" in found.message
    assert (
        "about 900 µs of 6 ms, or 0.78 µs each; the training thread spends 15 % of the time in the kernel"
        in found.message
    )
    assert found.gain_pct == pytest.approx(15.0)


def test_faults_that_take_a_quarter_are_a_warning() -> None:
    assert only(train(faults=1150.0, kernel=31.0)).finding.severity == "warning"


def test_time_in_the_kernel_counts_only_as_far_as_faults_can_take_it() -> None:
    assert only(train(faults=400.0, kernel=60.0)).finding.gain_pct == pytest.approx(100 * 400 * 2e-6 / 0.006)


def test_evaluations_between_the_steps_change_nothing() -> None:
    assert only(train(faults=1150.0, pause_every=40)).finding.gain_pct == pytest.approx(30.0)


@pytest.mark.parametrize(
    "more",
    [
        {"faults": 20.0},
        {"faults": 1150.0, "step_s": 0.1},
        {"faults": 1150.0, "kernel": 2.0},
        {"faults": 2600.0, "utilization": 95.0},
        {"faults": [20000.0 if number < 2 else 3.0 for number in range(60)]},
        {"faults": [5000.0 if number % 5 == 0 else 10.0 for number in range(60)]},
    ],
    ids=["few", "long steps", "the kernel says otherwise", "a busy GPU", "at the start", "now and then"],
)
def test_healthy_steps_are_silent(more: dict[str, float]) -> None:
    assert train(**more) == []  # type: ignore[arg-type]


def test_without_an_account_of_the_kernel_the_faults_count() -> None:
    assert only(train(faults=1150.0, kernel=None)).finding.gain_pct == pytest.approx(13.4, abs=0.1)


def test_the_alert_is_over_when_the_faults_are() -> None:
    changes = train(faults=[1150.0 if number < 30 else 5.0 for number in range(60)])
    assert [change.kind for change in changes if change.kind != "update"] == ["fire", "resolve"]


# ---- pressure and throttling


@dataclass(frozen=True, kw_only=True)
class _Reads(Rule):
    """A rule on samples of the host."""

    id: ClassVar[str] = "reads_host"
    severities = ("info",)
    place = Place(Question.IS_IT_FAST, 99)
    reads = (
        *(reading_of(f"host/{name}_pct", keep=24) for name in ("cpu_pressure", "memory_pressure", "io_pressure")),
        reading_of("host/cpu_throttled_pct", keep=24),
        Series("step_time_s", merge="median"),
    )
    life = Life()
    english = chinese = Words(name="", meaning="", fires="", remedies={"": ""})

    def judge(self, window: Window) -> Finding | None:
        pressed = [readings(window, one.name, 24) for one in self.reads if one.axis == "time"]
        if any(len(found) < 12 for found in pressed):
            return None
        return self.found("info", "", "", evidence={"pressure": [sum(found) / len(found) for found in pressed]})


def test_pressure_and_throttling_reach_rules_as_series_over_time() -> None:
    """Names, units and rows as the agent's sampler of the host sends them, every five seconds."""
    evaluator = make_evaluator(rules=(_Reads(),))
    changes: list[Change] = []
    names = ("host/cpu_pressure_pct", "host/memory_pressure_pct", "host/io_pressure_pct", "host/cpu_throttled_pct")
    for number in range(16):
        told = {name: [10.0 * (place + 1)] for place, name in enumerate(names)}
        changes += evaluator.take(frame(told, [50 * number], ident=evaluator.upto + 1))
        if number == 6:
            evaluator = restored(evaluator)
    [change] = fired(changes)
    assert change.finding.evidence["pressure"] == [10.0, 20.0, 30.0, 40.0]
