"""low_mfu on made-up series: no device has told its own yet."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from judging import fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.low_mfu import LowMfu
from perfagent_server.rules.speed.throughput_regression import ThroughputRegression

PEAK = 989e12


def train(
    mfu_of: Callable[[int], float],
    steps: range,
    *,
    work_of: Callable[[int], float] = lambda _: 1.2e14,
    noise: float = 0.005,
    rules: tuple[Rule, ...] = (LowMfu(),),
    evaluator: Evaluator | None = None,
) -> tuple[list[Change], Evaluator]:
    """Steps of so much arithmetic, at that utilization of an H100."""
    evaluator = evaluator or make_evaluator(rules=rules)
    draw = random.Random(steps.start)
    changes: list[Change] = []
    for step in steps:
        mfu = mfu_of(step) * (1 + draw.gauss(0, noise))
        took = work_of(step) / (mfu * PEAK)
        columns = {
            "step_time_s": [took], "mfu": [mfu], "flops_per_s": [mfu * PEAK], "phase/forward_s": [0.33 * took],
            "phase/backward_s": [0.6 * took], "phase/optimizer_s": [0.05 * took], "phase/other_s": [0.02 * took],
        }  # fmt: skip
        changes += evaluator.take(frame(columns, [step], ident=evaluator.upto + 1, step_s=0.3))
    return changes, evaluator


def test_a_fall_by_six_percent_is_a_warning_with_the_step_and_both_levels() -> None:
    changes, _ = train(lambda step: 0.40 if step <= 300 else 0.376, range(1, 360))
    [change] = fired(changes)
    found = change.finding
    assert (found.severity, found.cause) == ("warning", "fell")
    assert 299 <= (found.since_step or 0) <= 303
    assert "MFU is 37." in found.message
    assert "than the 40" in found.message
    assert "forward, backward and optimizer take 98 % of a step (P50" in found.message


def test_other_shapes_with_another_utilization_are_a_remark() -> None:
    changes, _ = train(
        lambda step: 0.40 if step <= 300 else 0.35,
        range(1, 360),
        work_of=lambda step: 1.2e14 if step <= 300 else 2.4e14,
    )
    [change] = fired(changes)
    assert change.finding.severity == "info"
    assert "a step has other arithmetic since then" in change.finding.message


def test_a_low_level_is_a_remark_from_the_start_and_is_over_when_it_rises() -> None:
    changes, evaluator = train(lambda _: 0.08, range(1, 200))
    [change] = fired(changes)
    assert change.finding.severity == "info"
    assert change.finding.title == "MFU is 8.01 %: the devices could do 12 times the arithmetic"
    changes, _ = train(lambda _: 0.45, range(200, 1200), evaluator=evaluator)
    assert "resolve" in [change.kind for change in changes]


def test_slower_steps_and_their_lower_utilization_are_one_alert() -> None:
    rules = (ThroughputRegression(), LowMfu())
    changes, evaluator = train(lambda step: 0.40 if step <= 300 else 0.36, range(1, 360), rules=rules)
    assert {change.alert for change in changes} == {change.alert for change in fired(changes)}
    assert evaluator.machines["low_mfu"].absorbed


def test_an_alert_on_mfu_outlives_a_restart_of_the_server() -> None:
    _, evaluator = train(lambda step: 0.40 if step <= 300 else 0.37, range(1, 360))
    evaluator = restored(evaluator)
    changes, evaluator = train(lambda _: 0.37, range(360, 460), evaluator=evaluator)
    assert {change.kind for change in changes} <= {"update"}
    assert [one.rule for one in evaluator.findings()] == ["low_mfu"]


@pytest.mark.parametrize("noise", [0.005, 0.05, 0.2])
def test_a_good_level_with_its_noise_is_silent(noise: float) -> None:
    assert train(lambda _: 0.45, range(1, 1500), noise=noise)[0] == []


def test_without_a_known_peak_there_is_nothing_to_say() -> None:
    evaluator = make_evaluator(rules=(LowMfu(),))
    for step in range(1, 200):
        assert evaluator.take(frame({"step_time_s": [1.0], "flops_per_s": [1e12]}, [step], ident=step)) == []
