"""step_time_tail: single steps that take far longer than the others, more of them than at the beginning."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from judging import fired, frame, make_evaluator, restored

from perfagent_server.alerts.state_machine import Change
from perfagent_server.backtest.replay import replay
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.step_time_tail import StepTimeTail

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / "detection")]

import records  # noqa: E402

RULE = StepTimeTail()


def train(
    times: Sequence[float],
    *,
    phase: str = "other",
    evals: bool = False,
    evaluator: Evaluator | None = None,
    first: int = 1,
    load: tuple[float, float] | None = None,
) -> tuple[list[Change], Evaluator]:
    """Steps that take so long; what they take more than 100 ms is in that phase. evals: or in an evaluation. load: how
    much of two cores all programs use, and how much of one core the run, in percent."""
    evaluator = evaluator or make_evaluator(rules=(RULE,))
    changes: list[Change] = []
    for step, time in enumerate(times, first):
        more = max(0.0, time - 0.1)
        columns = {
            "step_time_s": [time],
            "phase/forward_s": [time - more],
            f"phase/{phase}_s": [0.0 if evals else more],
        }
        if evals and more > 0.01:
            columns["phase/eval_s"] = [more]
        if load is not None:
            columns |= {"host/cores": [2.0], "host/cpu_pct": [load[0]], "process/cpu_pct": [load[1]]}
        changes += evaluator.take(frame(columns, [step], ident=evaluator.upto + 1))
    return changes, evaluator


def noisy(steps: int, *, slow_every: int = 0, slow: float = 0.0, by_chance: float = 0.0, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    times = [0.1 * (1 + 0.03 * abs(draw.gauss(0, 1))) for _ in range(steps)]
    return [
        slow if (slow_every and step % slow_every == 0) or draw.random() < by_chance else time
        for step, time in enumerate(times, 1)
    ]


def test_steps_that_are_slow_by_chance_are_told_with_their_phase_and_what_they_cost() -> None:
    changes, _ = train(noisy(600) + noisy(1000, by_chance=0.03, slow=0.5, seed=1))
    [change] = fired(changes)
    found = change.finding
    assert 600 < change.step < 1300
    assert (found.severity, found.cause, found.evidence["phase"]) == ("warning", "", "other")
    assert "10 of the newest 565 steps took about 499 ms, where a step takes 102 ms (P50; P90 105 ms)" in found.message
    assert found.message.endswith("Other takes most of that.")
    assert found.evidence["share_pct"] == pytest.approx(10, abs=4)


def test_slow_steps_at_even_intervals_are_told_to_be_regular() -> None:
    changes, _ = train(noisy(600) + noisy(1000, slow_every=40, slow=0.4, seed=1))
    [change] = fired(changes)
    assert (change.finding.cause, change.finding.evidence["every_steps"]) == ("regular", 40)
    assert ", every 40 steps," in change.finding.message


def test_batches_that_come_late_are_the_loader_s() -> None:
    [change] = fired(train(noisy(600) + noisy(1000, by_chance=0.03, slow=0.5, seed=1), phase="data")[0])
    assert change.finding.cause == "data"


def test_a_few_slow_steps_that_cost_little_are_a_remark() -> None:
    [change] = fired(train(noisy(600) + noisy(1000, by_chance=0.014, slow=0.35, seed=2))[0])
    assert change.finding.severity == "info"


def test_a_server_that_is_restarted_in_the_middle_goes_on_where_it_was() -> None:
    times = noisy(600) + noisy(1000, by_chance=0.03, slow=0.5, seed=1)
    whole, _ = train(times)
    evaluator: Evaluator | None = None
    pieces: list[Change] = []
    for begin in range(0, len(times), 173):
        changes, evaluator = train(times[begin : begin + 173], evaluator=evaluator, first=begin + 1)
        pieces += changes
        evaluator = restored(evaluator)
    assert [(change.step, change.finding.message) for change in fired(pieces)] == [
        (change.step, change.finding.message) for change in fired(whole)
    ]


def test_it_is_over_when_the_newest_thousand_steps_are_even_again() -> None:
    times = noisy(600) + noisy(1000, by_chance=0.03, slow=0.5, seed=1) + noisy(1200, seed=3)
    kinds = [change.kind for change in train(times)[0] if change.kind != "update"]
    assert kinds == ["fire", "resolve"]


@pytest.mark.parametrize(
    "times",
    [
        noisy(3000, slow_every=50, slow=0.8),
        noisy(3000, by_chance=0.02, slow=0.6),
        noisy(3000, slow_every=500, slow=5.0),
        [*noisy(1000), *[0.3] * 300, *noisy(1700, seed=1)],
        [*noisy(1000), *noisy(30, by_chance=0.3, slow=0.5, seed=2)],
    ],
    ids=["regular from the start", "a tail from the start", "a save now and then", "a slow stretch", "a short burst"],
)
def test_what_was_so_from_the_start_is_rare_or_is_no_tail_is_silent(times: list[float]) -> None:
    assert train(times)[0] == []


def test_evaluations_that_begin_later_are_no_tail() -> None:
    assert train(noisy(600) + noisy(1500, slow_every=20, slow=1.0, seed=1), evals=True)[0] == []


def test_recorded_healthy_runs_are_silent() -> None:
    """A part of them; benchmarks/detection judges all."""
    for record in [*records.curves()[1::9], *records.mlperf()]:
        assert replay(record.moments, Plan((RULE,))).alerts == [], record.name


@pytest.mark.parametrize(("load", "severity"), [((100.0, 100.0), "info"), ((60.0, 110.0), "warning")])
def test_slow_steps_beside_other_busy_programs_are_a_remark(load: tuple[float, float], severity: str) -> None:
    times = noisy(600) + noisy(1200, slow_every=40, slow=0.5)
    [change] = fired(train(times, load=load)[0])
    assert change.finding.severity == severity
    assert ("other programs use many of the cores" in change.finding.message) == (severity == "info")
