"""checkpoint_stale and checkpoint_anomaly."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.checkpoint_anomaly import CheckpointAnomaly
from perfagent_server.rules.memory.checkpoint_stale import CheckpointStale

MIB, GIB = 2.0**20, 2.0**30


def saves(*steps: int, seconds: float = 2.0) -> dict[int, dict[str, float]]:
    return {step: {"phase/checkpoint_s": seconds} for step in steps}


def stale(step_s: float = 1.0) -> Job:
    return Job(CheckpointStale(), steps=every(step_s), every_s=5.0)


# ---- checkpoint_stale


def test_saves_that_stopped_are_told_after_twice_their_interval() -> None:
    job = stale()
    job.go_on(2600, logged=saves(500, 1000, 1500))
    [change] = job.fired
    found = change.finding
    assert (found.rule, found.severity, found.since_step) == ("checkpoint_stale", "warning", 1500)
    assert 2500 <= change.step <= 2530
    assert "The newest checkpoint is of step 1,500" in found.message
    assert "had 500 steps (8 min)" in found.message


def test_a_new_save_resolves_it() -> None:
    job = stale()
    job.go_on(3000, logged=saves(500, 1000, 1500, 2700))
    assert [change.kind for change in job.changes if change.kind != "update"] == ["fire", "resolve"]


@pytest.mark.parametrize(
    "steps",
    [
        range(500, 6000, 500),
        [400, 900, 1500, 2050, 2500, 3100],  # about every 500
        [1000],  # one save, hours ago
        [1000, 2000],
        [100, 200, 400, 700, 1500, 2500],  # the best model only
    ],
)
def test_saves_that_go_on_are_silent(steps: Iterable[int]) -> None:
    job = stale()
    job.go_on(3400, logged=saves(*steps))
    assert job.changes == []


def test_saves_of_the_best_model_only_are_a_remark_when_they_stay_away() -> None:
    job = stale()
    job.go_on(5000, logged=saves(100, 200, 400, 700))
    assert [change.finding.severity for change in job.fired] == ["info"]


def test_a_run_that_stands_still_is_for_the_rule_on_hangs() -> None:
    job = Job(CheckpointStale(), steps=lambda now: min(now, 1600), every_s=5.0)
    job.go_on(6000, logged=saves(500, 1000, 1500))
    assert job.changes == []


def test_short_intervals_of_a_fast_loop_cost_next_to_nothing() -> None:
    job = stale(0.01)
    job.go_on(200, logged=saves(1000, 2000, 3000))
    assert job.changes == []


def test_saves_beside_the_training_count_when_they_are_there() -> None:
    job = stale()
    job.go_on(3400, logged={step: {"checkpoint/saved_bytes": GIB} for step in range(500, 3400, 500)})
    assert job.changes == []


def test_a_run_that_never_saves_gets_a_remark() -> None:
    job = Job(CheckpointStale(), steps=every(2), every_s=15.0)
    job.go_on(7500)
    [change] = job.fired
    assert (change.finding.severity, change.finding.cause) == ("info", "never")
    assert change.finding.title == "No checkpoint in 2 h"


def test_saves_that_are_only_seen_by_their_folder_are_saves() -> None:
    job = Job(CheckpointStale(), steps=every(2), every_s=15.0)
    job.go_on(7500, lambda _: {"disk/checkpoint_free_bytes": 1e12})
    assert job.changes == []


def test_a_run_that_began_from_a_checkpoint_has_one() -> None:
    job = Job(CheckpointStale(), steps=every(2), every_s=15.0)
    job.evaluator.window.start_step = 10
    job.go_on(7500)
    assert job.changes == []


# ---- checkpoint_anomaly


def anomaly() -> Job:
    return Job(CheckpointAnomaly(), steps=every(0.5), every_s=2.0)


def sizes(*mib: float) -> dict[int, dict[str, float]]:
    return {100 * (place + 1): {"checkpoint/saved_bytes": size * MIB} for place, size in enumerate(mib)}


def test_a_save_that_is_ten_times_as_large_is_told_until_the_next_usual_one() -> None:
    job = anomaly()
    job.go_on(280, logged=sizes(500, 510, 505, 5200, 500))
    assert [change.kind for change in job.changes] == ["fire", "resolve"]
    found = job.fired[0].finding
    assert (found.severity, found.cause, found.since_step) == ("warning", "large", 400)
    assert found.message == "The checkpoint of step 400 has 5.08 GiB, 10 times the 505 MiB of the 3 before it."


@pytest.mark.parametrize(
    "saved", [(500, 510, 505, 1500, 2500), (500, 5000), (1, 1, 1, 20), (5000, 500, 500, 500, 500), (500,) * 6]
)
def test_sizes_that_grow_or_are_small_are_no_anomaly(saved: tuple[float, ...]) -> None:
    job = anomaly()
    job.go_on(350, logged=sizes(*saved))
    assert job.changes == []


def test_a_first_save_that_is_larger_than_all_that_is_trained_is_a_remark() -> None:
    job = anomaly()
    held = {"memory/parameters_bytes": 100 * MIB, "memory/optimizer_state_bytes": 200 * MIB}
    job.go_on(100, lambda _: held, logged=sizes(2000))
    assert [(change.finding.severity, change.finding.cause) for change in job.fired] == [("info", "large")]
    assert "clone()" in job.fired[0].finding.fix
    healthy = anomaly()
    healthy.go_on(100, lambda _: held, logged=sizes(620))  # with an average of the weights
    assert healthy.changes == []


def test_a_save_that_is_ten_times_as_slow() -> None:
    job = anomaly()
    job.go_on(300, logged={**saves(100, 200, 300), **saves(400, seconds=45.0), **saves(500)})
    assert [change.kind for change in job.changes] == ["fire", "resolve"]
    assert job.fired[0].finding.message == "The save of step 400 took 45 s, 22 times the 2 s that 3 before it took."


@pytest.mark.parametrize("slow_s", [8.0, 0.4])
def test_a_save_that_is_a_little_slower_is_none(slow_s: float) -> None:
    job = anomaly()
    usual = saves(100, 200, 300, seconds=0.02 if slow_s < 1 else 2.0)
    job.go_on(300, logged={**usual, **saves(400, seconds=slow_s)})
    assert job.changes == []


def test_a_first_save_that_was_slow_is_the_past() -> None:
    job = anomaly()
    job.go_on(300, logged={**saves(100, seconds=60.0), **saves(200, 300, 400, 500)})
    assert job.changes == []


def test_failed_saves_are_a_warning_and_then_critical_until_one_succeeds() -> None:
    failed = {"checkpoint/failed": 1.0}
    logged = {100: {"checkpoint/saved_bytes": GIB}, 200: failed, 300: failed, 400: {"checkpoint/saved_bytes": GIB}}
    job = anomaly()
    job.go_on(130, logged=logged)
    assert [change.finding.severity for change in job.fired] == ["warning"]
    assert "the newest good one is of step 100" in job.fired[0].finding.message
    job.go_on(50, logged=logged)
    assert job.evaluator.findings()[0].severity == "critical"
    assert job.evaluator.findings()[0].title == "The newest 2 saves failed"
    job.go_on(60, logged=logged)
    assert job.evaluator.findings() == []


def test_damaged_checkpoints_that_were_passed_over_are_told_for_half_an_hour() -> None:
    job = anomaly()
    job.go_on(60, logged={1: {"checkpoint/damaged": 2.0}})
    [change] = job.fired
    assert change.finding.title == "2 damaged checkpoints were passed over"
    job.go_on(2000)
    assert job.evaluator.findings() == []
