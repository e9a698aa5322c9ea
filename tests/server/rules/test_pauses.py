"""eval_bound and checkpoint_bound: what evaluations and saves cost of wall time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.pauses import CheckpointBound, EvalBound

STEP = {"forward": 0.04, "backward": 0.05, "other": 0.01}
RULES = (EvalBound(), CheckpointBound())


def run(
    phase: str, seconds: list[float], *, every: int = 100, step: dict[str, float] = STEP, ranks: int = 1
) -> TimedJob:
    """Every so many steps (of 0.1 s) one pause of the next of these lengths."""
    made = TimedJob(*RULES, ranks=ranks)
    for length in seconds:
        made.train(every - 1, step)
        made.train(1, step | {phase: length}, others=step | {"comm": length} if ranks > 1 else None)
    return made


@pytest.mark.parametrize(("phase", "rule"), [("eval", "eval_bound"), ("checkpoint", "checkpoint_bound")])
@pytest.mark.parametrize(("seconds", "severity"), [(1.1, None), (1.12, "info"), (4.9, "info"), (4.95, "warning")])
def test_a_tenth_of_wall_time_is_a_remark_a_third_a_warning(
    phase: str, rule: str, seconds: float, severity: str | None
) -> None:
    made = run(phase, [seconds] * 12)
    assert [one.severity for one in made.found(rule)] == ([severity] if severity else [])
    assert {change.finding.rule for change in made.changes} <= {rule}
    for found in made.found(rule):
        share = 100 * seconds / (10 + seconds)
        assert (found.evidence["share_pct"], found.gain_pct) == (pytest.approx(share), pytest.approx(share / 2))
        assert (found.evidence["every_steps"], found.evidence["seconds_each"]) == (100, pytest.approx(seconds))
    assert made.evaluator.verdict().rule == (rule if severity == "warning" else "healthy")


def test_a_short_run_is_told_within_its_first_minute() -> None:
    made = run("checkpoint", [1.0] * 6, every=20)
    assert made.now < made.changes[0].time + 15
    [found] = made.found("checkpoint_bound")
    assert found.evidence["share_pct"] == pytest.approx(100 / 3)


def last_evaluation() -> TimedJob:
    made = run("eval", [1.0], every=700)
    made.train(700, STEP)
    made.beside({"eval": 60.0})
    made.wait(30)
    made.finish()
    return made


HEALTHY: dict[str, Callable[[], TimedJob]] = {
    "the only save of a short run": lambda: run("checkpoint", [30.0], every=300),
    "the only save of a longer run": lambda: run("checkpoint", [30.0], every=3000),
    "the last evaluation": last_evaluation,
    "a first evaluation that compiles": lambda: run("eval", [60.0, *[0.5] * 8]),
    "one long save among short ones": lambda: run("checkpoint", [0.5] * 5 + [60.0] + [0.5] * 5),
    # three minutes once an hour are a third of the newest ten minutes, and 5 % of the time
    "rare and long evaluations": lambda: run("eval", [180.0] * 6, every=360, step={"forward": 10.0}),
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_pauses_that_cost_little_are_silent(kind: str) -> None:
    assert HEALTHY[kind]().changes == []


def test_only_rank_0_saves_whoever_is_heard_first() -> None:
    made = run("checkpoint", [2.0] * 8, every=50, ranks=4)
    [found] = made.found("checkpoint_bound")
    assert found.evidence["share_pct"] == pytest.approx(100 * 2 / 7)
    assert found.evidence["share_of_run_pct"] > 20


def test_an_evaluation_under_way_changes_nothing_rare_ones_heal() -> None:
    made = run("eval", [4.0] * 8)
    before = len(made.changes)
    made.restart_server()
    made.wait(3600)
    assert len(made.changes) == before
    made.train(3000, STEP)
    assert made.kinds == ["fire", "resolve"]
