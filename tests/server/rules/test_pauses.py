"""eval_bound and checkpoint_bound: what evaluations and saves cost of wall time."""

from __future__ import annotations

import pytest
from judging import fired, judge_series
from timed_job import TimedJob

from perfagent_server.rules.speed.checkpoint_bound import CheckpointBound
from perfagent_server.rules.speed.eval_bound import EvalBound

STEP = {"forward": 0.04, "backward": 0.05, "other": 0.01}
RULES = (EvalBound(), CheckpointBound())


def job(ranks: int = 1) -> TimedJob:
    return TimedJob(*RULES, ranks=ranks)


def run(phase: str, seconds: list[float], *, every: int = 100, first: int = 0, ranks: int = 1) -> TimedJob:
    """Every so many steps of 0.1 s one pause of the next of these lengths."""
    made = job(ranks)
    made.train(first, STEP)
    for length in seconds:
        made.train(every - 1, STEP)
        made.train(1, STEP | {phase: length}, others=STEP | {"comm": length} if ranks > 1 else None)
    return made


@pytest.mark.parametrize(("phase", "rule"), [("eval", "eval_bound"), ("checkpoint", "checkpoint_bound")])
@pytest.mark.parametrize(("seconds", "severity"), [(0.9, None), (1.3, "info"), (4.0, "warning")])
def test_the_share_of_wall_time_decides(phase: str, rule: str, seconds: float, severity: str | None) -> None:
    made = run(phase, [seconds] * 12)
    assert [one.severity for one in made.found(rule)] == ([severity] if severity else [])
    assert {change.finding.rule for change in made.changes} <= {rule}
    for found in made.found(rule):
        share = 100 * seconds / (10 + seconds)
        assert found.evidence["share_pct"] == pytest.approx(share)
        assert found.gain_pct == pytest.approx(share / 2)
        assert found.evidence["every_steps"] == 100
        for words in (f"{share:.0f} % of wall time", f"{seconds:.3g} s each", "every 100 steps", "every 200 steps"):
            assert words in found.message
        assert made.evaluator.verdict().rule == (rule if severity else "healthy")


def test_how_often_is_told_in_words() -> None:
    made = run("checkpoint", [4.0] * 8, every=100)
    assert (
        "4 s each, one every 100 steps (14 s), over the newest 7 saves." in made.found("checkpoint_bound")[-1].message
    )
    made = run("checkpoint", [1.0] * 5, every=1)
    assert "1 s each, after every step (1.1 s), over the newest " in made.found("checkpoint_bound")[-1].message
    made = run("eval", [60.0, 600.0], every=600)
    assert "(660 s), over the newest evaluation." in made.found("eval_bound")[-1].message


def test_a_short_run_is_told_within_its_first_minute() -> None:
    made = run("checkpoint", [1.0] * 6, every=20)
    [found] = made.found("checkpoint_bound")
    assert made.now < made.changes[0].time + 15
    assert found.evidence["share_pct"] == pytest.approx(100 / 3)


def test_the_only_save_of_a_short_run_is_no_fault() -> None:
    assert run("checkpoint", [30.0], every=300).changes == []
    assert run("checkpoint", [30.0], every=3000).changes == []


def test_the_last_evaluation_is_no_fault() -> None:
    made = run("eval", [1.0], every=700)
    made.train(700, STEP)
    made.beside({"eval": 60.0})
    made.wait(30)
    made.finish()
    assert made.changes == []


def test_a_first_evaluation_that_compiles_is_no_fault() -> None:
    assert run("eval", [60.0, *[0.5] * 8]).changes == []


def test_one_long_save_among_short_ones_is_no_fault() -> None:
    assert run("checkpoint", [0.5] * 5 + [60.0] + [0.5] * 5).changes == []


def test_a_check_before_the_first_step_and_one_evaluation_are_no_fault() -> None:
    made = job()
    made.train(1, STEP | {"eval": 10.0})
    made.train(900, STEP)
    made.train(1, STEP | {"eval": 10.0})
    made.train(500, STEP)
    assert made.changes == []


def test_saves_at_the_powers_of_two_are_no_fault() -> None:
    made = job()
    for step in range(1, 4000):
        made.train(1, STEP | ({"checkpoint": 1.0} if step & (step - 1) == 0 else {}))
    assert made.changes == []


def test_rare_and_long_evaluations_are_weighed_by_whole_intervals() -> None:
    """Three minutes once an hour are a third of the newest ten minutes, and 5 % of the time."""
    step = {"forward": 10.0}
    made = job()
    for _ in range(6):
        made.train(359, step)
        made.train(1, step | {"eval": 180.0})
    assert made.changes == []


def test_rare_evaluations_that_take_a_third_are_found() -> None:
    step = {"forward": 10.0}
    made = job()
    for _ in range(5):
        made.train(120, step)
        made.train(1, step | {"eval": 600.0})
    [found] = made.found("eval_bound")
    assert found.severity == "warning"
    assert found.evidence["share_pct"] == pytest.approx(100 * 600 / 1810, rel=0.01)


def test_quick_evaluations_with_a_whole_one_now_and_then_are_weighed_together() -> None:
    made = run("eval", [10.0 if place % 5 == 4 else 1.0 for place in range(20)])
    [found] = made.found("eval_bound")
    assert found.evidence["share_pct"] == pytest.approx(100 * 2.8 / 12.8, abs=3)


def test_only_rank_0_saves_whoever_is_heard_first() -> None:
    made = job(ranks=4)
    made.evaluator.window.heard.clear()
    for _ in range(8):
        made.train(49, STEP)
        made.train(1, STEP | {"checkpoint": 2.0}, others=STEP | {"comm": 2.0})
    [found] = made.found("checkpoint_bound")
    assert found.evidence["share_pct"] == pytest.approx(100 * 2 / 7)
    assert found.evidence["share_of_run_pct"] > 20


def test_nothing_changes_while_an_evaluation_is_under_way() -> None:
    made = run("eval", [4.0] * 8)
    before = len(made.changes)
    made.wait(3600)
    assert len(made.changes) == before


def test_it_heals_when_evaluations_become_rare() -> None:
    made = run("eval", [4.0] * 8)
    made.train(3000, STEP)
    assert [change.kind for change in made.changes if change.kind != "update"] == ["fire", "resolve"]


def test_a_restart_of_the_server_changes_nothing() -> None:
    made, other = job(), job()
    for place in range(12):
        for one in (made, other):
            one.train(99, STEP)
            one.train(1, STEP | {"eval": 4.0})
        if place % 3 == 1:
            made.restart_server()
    assert [(change.kind, change.step, change.finding) for change in made.changes] == [
        (change.kind, change.step, change.finding) for change in other.changes
    ]
    assert len(made.changes) == len(other.changes) > 0


def test_many_steps_in_a_frame_are_judged_as_in_many() -> None:
    steps = 2000
    seconds = [4.0 if step % 100 == 0 else 0.0 for step in range(1, steps + 1)]
    series = {"step_time_s": [0.1 + one for one in seconds], "phase/eval_s": seconds}
    changes, evaluator = judge_series(series, rules=RULES, rows=2000, step_s=0.14)
    assert [change.finding.rule for change in fired(changes)] == ["eval_bound"]
    assert evaluator.verdict().rule == "eval_bound"


def test_without_evaluations_and_saves_nothing_is_kept() -> None:
    made = job()
    made.train(300, STEP)
    assert made.changes == []
    assert made.evaluator.window.state_of(EvalBound(), {"rows": []}) == {"rows": []}
