"""sync_bound: values of tensors that are read one by one. On a GPU: made-up series, not yet seen on a card."""

from __future__ import annotations

import pytest
from timed_job import TimedJob

from perfagent.wire import Event
from perfagent_server.rules.speed.sync_bound import SyncBound
from perfagent_server.rules.speed.unmeasured_time import UnmeasuredTime

SYNC = SyncBound()
LINES = [{"line": "train.py:97", "count": 1000}, {"line": "train.py:98", "count": 24}]


def job(other_s: float, *, busy_pct: float | None = None, forward_s: float = 0.05) -> TimedJob:
    made = TimedJob(SYNC, UnmeasuredTime())
    for _ in range(30):
        made.train(10, {"forward": forward_s, "other": other_s})
        if busy_pct is not None:
            made.read(gpu__utilization_pct=busy_pct)
    return made


def look(made: TimedJob, calls: float, reading_s: float | None = None, lines: object = None) -> None:
    """The agent tells what it found in a sampled step."""
    values = (
        {"sync__calls_per_step": calls}
        if reading_s is None
        else {"sync__reads_per_step": calls, "sync__reading_s": reading_s}
    )
    made.send([made._group({name.replace("__", "/"): value for name, value in values.items()})])
    made.send([], events=[Event(kind="sync", time=made.now, step=made.step, data={"lines": lines or LINES})])


def go_on(made: TimedJob, other_s: float, forward_s: float = 0.05) -> None:
    made.train(200, {"forward": forward_s, "other": other_s})


def test_a_loop_over_values_on_the_cpu_is_named_with_its_line_and_its_time() -> None:
    made = job(0.03)
    look(made, 1024, reading_s=0.028)
    go_on(made, 0.03)
    [found] = made.found("sync_bound")
    assert found.severity == "warning"
    assert "reads 1,024 single values of tensors in a step, 1,000 of them in train.py:97" in found.message
    assert "28 ms of 80 ms (35 %; P90 of the step 80 ms)" in found.message
    assert found.evidence["lines"] == LINES
    assert ".tolist()" in found.fix
    assert made.evaluator.verdict().rule == "sync_bound"


def test_it_is_not_told_as_unmeasured_time_too() -> None:
    made = job(0.03)
    [unmeasured] = made.found("unmeasured_time")
    assert unmeasured.severity == "info"
    look(made, 1024, reading_s=0.028)
    go_on(made, 0.03)
    made.wait(60)
    go_on(made, 0.03)
    assert made.evaluator.window.firing == {"sync_bound"}


@pytest.mark.parametrize(
    ("calls", "reading_s"),
    [(0, 0.0), (1, 2e-6), (300, 0.004)],
    ids=["none", "the loss in every step", "a few hundred"],
)
def test_reads_that_cost_little_are_silent(calls: float, reading_s: float) -> None:
    made = job(0.01)
    look(made, calls, reading_s=reading_s)
    go_on(made, 0.01)
    assert made.changes == []


def test_a_loop_cannot_take_longer_than_the_part_of_the_step_that_it_is_in() -> None:
    """The sampled step was slower: other programs took the core."""
    made = job(0.012)
    look(made, 1024, reading_s=0.5)
    go_on(made, 0.012)
    [found] = made.found("sync_bound")
    assert found.evidence["lost_s"] == pytest.approx(0.05), "it may be in forward"


def test_the_alert_survives_a_restart_of_the_server_and_heals_with_the_next_look() -> None:
    made = job(0.03)
    look(made, 1024, reading_s=0.028)
    go_on(made, 0.03)
    made.restart_server()
    go_on(made, 0.03)
    look(made, 0, reading_s=0.0)
    go_on(made, 0.001)
    made.wait(60)
    go_on(made, 0.001)
    kinds = [change.kind for change in made.changes if change.finding.rule == "sync_bound" and change.kind != "update"]
    assert kinds == ["fire", "resolve"]


def test_on_a_gpu_the_time_in_no_phase_is_what_it_costs() -> None:
    made = job(0.02, busy_pct=60.0)
    look(made, 3)
    go_on(made, 0.02)
    [found] = made.found("sync_bound")
    assert "3 calls a step make the host wait for the device" in found.message
    assert found.evidence["share_pct"] == pytest.approx(100 * 0.02 / 0.07)


def test_on_a_gpu_calls_within_the_forward_pass_show_as_idle_time() -> None:
    made = job(0.0, busy_pct=55.0, forward_s=0.2)
    look(made, 48)
    go_on(made, 0.0, forward_s=0.2)
    [found] = made.found("sync_bound")
    assert found.evidence["share_pct"] == pytest.approx(45.0)


@pytest.mark.parametrize(("other_s", "busy_pct", "calls"), [(0.02, 97.0, 1), (0.002, 85.0, 1), (0.0, 98.0, 60)])
def test_a_busy_gpu_waits_for_nobody(other_s: float, busy_pct: float, calls: int) -> None:
    made = job(other_s, busy_pct=busy_pct, forward_s=0.2)
    look(made, calls)
    go_on(made, other_s, forward_s=0.2)
    assert made.found("sync_bound") == []


def test_loops_in_which_each_step_makes_a_rollout_are_judged_too() -> None:
    made = TimedJob(SYNC)
    made.train(50, {"rollout": 0.05, "forward": 0.01, "other": 0.04})
    look(made, 2048, reading_s=0.03)
    made.train(200, {"rollout": 0.05, "forward": 0.01, "other": 0.04})
    assert [found.evidence["share_pct"] for found in made.found("sync_bound")] == [pytest.approx(30.0)]


@pytest.mark.parametrize("lines", [None, "x", [1, {"line": 3}], [{"line": "a.py:1", "count": "many"}]])
def test_an_event_of_another_form_names_no_line(lines: object) -> None:
    made = job(0.03)
    look(made, 1024, reading_s=0.028, lines=lines or "nothing")
    go_on(made, 0.03)
    [found] = made.found("sync_bound")
    assert found.evidence["lines"] == []
