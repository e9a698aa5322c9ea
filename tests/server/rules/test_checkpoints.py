"""checkpoint_stale and checkpoint_anomaly."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.checkpoint_anomaly import CheckpointAnomaly
from perfagent_server.rules.memory.checkpoint_stale import CheckpointStale

MIB, GIB = 2.0**20, 2.0**30
Logged = Mapping[int, Mapping[str, float]]


def saves(*steps: int, seconds: float = 2.0) -> dict[int, Mapping[str, float]]:
    return {step: {"phase/checkpoint_s": seconds} for step in steps}


def stale(seconds: float, steps: Iterable[int], step_s: float = 1.0) -> Job:
    return Job(CheckpointStale(), steps=every(step_s), every_s=5.0).go_on(seconds, logged=saves(*steps))


@pytest.mark.parametrize(
    ("seconds", "steps", "kinds", "told"),
    [
        (2600, (500, 1000, 1500), ["fire"], ("warning", 1500, 2500)),
        (3000, (500, 1000, 1500, 2700), ["fire", "resolve"], ("warning", 1500, 2500)),
        # half as much again makes them uneven: three times the longest is then waited for
        (3400, (400, 800, 1400), ["fire"], ("warning", 1400, 2400)),
        (3400, (400, 800, 1402), ["fire"], ("info", 1402, 3208)),
        (3400, range(500, 6000, 500), [], None),
        (3400, (400, 900, 1500, 2050, 2500, 3100), [], None),
        (3400, (1000,), [], None),
        (3400, (1000, 2000), [], None),
        (3400, (100, 200, 400, 700, 1500, 2500), [], None),
    ],
    ids=["stopped", "late", "even", "uneven", "as usual", "about every 500", "one", "two", "the best model only"],
)
def test_saves_that_stopped_are_told_after_twice_their_interval(
    seconds: float, steps: Iterable[int], kinds: list[str], told: tuple[str, int, int] | None
) -> None:
    job = stale(seconds, steps)
    assert job.kinds == kinds
    for change in job.fired:
        severity, since, at = told or ("", 0, 0)
        assert (change.finding.severity, change.finding.since_step) == (severity, since)
        assert at <= change.step <= at + 30


def test_short_intervals_and_steps_that_stand_still_are_silent() -> None:
    """A fast loop loses next to nothing; a run that hangs is for the rule on hangs."""
    assert stale(200, (1000, 2000, 3000), step_s=0.01).changes == []
    standing = Job(CheckpointStale(), steps=lambda now: min(now, 1600), every_s=5.0)
    assert standing.go_on(6000, logged=saves(500, 1000, 1500)).changes == []
    beside = {step: {"checkpoint/saved_bytes": GIB} for step in range(500, 3400, 500)}
    assert Job(CheckpointStale(), steps=every(1), every_s=5.0).go_on(3400, logged=beside).changes == []


@pytest.mark.parametrize(
    ("seconds", "step_s", "start_step", "folder", "told"),
    [
        (7290, 2, 0, False, [("info", "never")]), (7170, 2, 0, False, []), (7500, 80, 0, False, []), (7500, 2, 10, False, []),
        (7500, 2, 0, True, []),
    ],
    ids=["two hours", "less", "few steps", "it began from a checkpoint", "seen by its folder"],
)  # fmt: skip
def test_a_run_that_never_saves_gets_a_remark(
    seconds: float, step_s: float, start_step: int, folder: bool, told: list[tuple[str, str]]
) -> None:
    job = Job(CheckpointStale(), steps=every(step_s), every_s=15.0)
    job.evaluator.window.start_step = start_step
    readings = [lambda _: {"disk/checkpoint_free_bytes": 1e12}] if folder else []
    assert job.go_on(seconds, *readings).told == told


def anomaly(seconds: float, logged: Logged, **held: float) -> Job:
    readings = {f"memory/{name}_bytes": mib * MIB for name, mib in held.items()}
    return Job(CheckpointAnomaly(), steps=every(0.5)).go_on(seconds, lambda _: readings, logged=logged)


def sizes(*mib: float) -> Logged:
    return {100 * place: {"checkpoint/saved_bytes": size * MIB} for place, size in enumerate(mib, 1)}


STATE = {"parameters": 100.0, "optimizer_state": 200.0}


@pytest.mark.parametrize(
    ("saved", "held", "told"),
    [
        ((500, 510, 505, 5050, 500), {}, [("warning", "large")]), ((500, 510, 505, 5040, 500), {}, []),
        ((1, 1, 1, 65, 1), {}, [("warning", "large")]), ((1, 1, 1, 64, 1), {}, []), ((500, 510, 505, 1500, 2500), {}, []),
        ((500, 500, 5100), {}, []), ((5000, 500, 500, 500, 500), {}, []),
        # or four times all that is trained, which takes no saves before it
        ((1200,), STATE, [("info", "large")]), ((1190,), STATE, []), ((2000,), {}, []),
    ],
)  # fmt: skip
def test_a_save_that_is_ten_times_as_large_is_told(
    saved: tuple[float, ...], held: dict[str, float], told: list[tuple[str, str]]
) -> None:
    job = anomaly(280, sizes(*saved), **held)
    assert job.told == told
    assert job.kinds == (["fire", "resolve"] if told and not held else ["fire"] * len(told))
    for change in job.fired:
        assert change.finding.evidence["bytes"] == saved[-1 if held else 3] * MIB


@pytest.mark.parametrize(
    ("mib", "grows"),
    [
        (range(10, 90, 6), True),
        (range(10, 70, 6), False),
        ((100, *range(300, 312)), False),
        ((90, 99, 180, 3) * 4, False),
    ],
    ids=["steadily", "by less than 64 MiB", "moments came after the first step", "several files in turn"],
)
def test_saves_that_grow_steadily_are_a_remark(mib: Sequence[int], grows: bool) -> None:
    saved = {100 * place: {"checkpoint/file_bytes": size * MIB} for place, size in enumerate(mib, 1)}
    assert anomaly(750, saved).told == [("info", "growing")] * grows


@pytest.mark.parametrize(
    ("mib", "held", "fires"),
    [((4, 4, 4, 311, 311), {"parameters": 4.0}, True), ((4, 4, 4, 311, 4), {"parameters": 4.0}, False),
     ((4, 4, 4, 311, 311), {"parameters": 80.0}, False), ((4, 4, 4, 311, 311), {}, False)],
    ids=["of which more follow", "one of another kind", "as large as the state", "of a state that nobody knows"],
)  # fmt: skip
def test_files_far_larger_than_before_and_than_the_state(
    mib: Sequence[int], held: dict[str, float], fires: bool
) -> None:
    saved = {100 * place: {"checkpoint/file_bytes": size * MIB} for place, size in enumerate(mib, 1)}
    assert anomaly(750, saved, **held).told == [("warning", "large")] * fires


@pytest.mark.parametrize(
    ("usual_s", "slow_s", "fires"), [(2.0, 20.0, True), (2.0, 19.9, False), (0.5, 10.5, True), (0.5, 10.4, False)]
)
def test_a_save_that_is_ten_times_as_slow_is_told(usual_s: float, slow_s: float, fires: bool) -> None:
    job = anomaly(300, {**saves(100, 200, 300, 500, seconds=usual_s), **saves(400, seconds=slow_s)})
    assert job.kinds == (["fire", "resolve"] if fires else [])
    assert all(change.finding.since_step == 400 for change in job.fired)


def test_failed_saves_are_critical_from_the_second_on() -> None:
    good, failed = {"checkpoint/saved_bytes": GIB}, {"checkpoint/failed": 1.0}
    logged = {100: good, 200: failed, 300: failed, 400: good}
    job = anomaly(130, logged)
    assert (job.told, job.found.evidence["newest_good_step"]) == ([("warning", "failed")], 100)
    assert job.go_on(50, logged=logged).now_open == [("critical", "failed")]
    assert job.go_on(60, logged=logged).now_open == []


def test_damaged_checkpoints_are_told_for_half_an_hour() -> None:
    job = anomaly(60, {1: {"checkpoint/damaged": 2.0}})
    assert (job.told, job.found.evidence["damaged"]) == ([("warning", "damaged")], 2)
    assert job.go_on(1700).now_open == [("warning", "damaged")]
    assert job.go_on(100).now_open == []
