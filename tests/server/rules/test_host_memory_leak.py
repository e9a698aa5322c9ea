"""host_memory_leak: named in time whatever its rate, and never what fills up, comes and goes, or is given back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from judging import START
from over_time import Job, Readings, every

from perfagent_server.rules.memory.host_memory_leak import HostMemoryLeak

MB, GB = 1e6, 1e9
Level = Callable[[float], float]


def train(seconds: float, readings: Readings, *, step_s: float = 0.05, every_s: float = 1.0) -> Job:
    return Job(HostMemoryLeak(), steps=every(step_s), every_s=every_s).go_on(seconds, readings)


def rss(level: Level) -> Readings:
    return lambda now: {"process/rss_bytes": level(now)}


@pytest.mark.parametrize(
    ("step_s", "mb_per_s", "onset_s", "noise_mb"),
    [(0.005, 1, 4, 20), (0.005, 200, 400, 0), (0.3, 50, 4, 20), (1, 10, 400, 20), (10, 30, 4, 0)],
)
def test_a_leak_is_named_in_time_whatever_its_rate(
    step_s: float, mb_per_s: float, onset_s: float, noise_mb: float
) -> None:
    """300 steps or 60 s, whichever is later, after 300 MB were added."""
    draw = random.Random(1)
    level = lambda now: 3 * GB + mb_per_s * MB * max(0.0, now - onset_s) + draw.gauss(0, noise_mb * MB)  # noqa: E731
    job = train(onset_s + 300 / mb_per_s + max(60.0, 300 * step_s), rss(level), step_s=step_s)
    found = job.found
    assert (found.rule, found.severity, found.cause) == ("host_memory_leak", "warning", "")
    assert found.evidence["bytes_per_hour"] == pytest.approx(3600 * mb_per_s * MB, rel=0.35)
    assert abs((found.since_step or 0) - onset_s / step_s) <= max(30 / step_s, 0.35 * job.evaluator.window.step)


def of_workers(now: float) -> dict[str, float]:
    """RSS stays: they copy pages that they shared. Their own memory is measured every half minute only."""
    shared = {"process/workers_rss_bytes": 8 * GB, "process/workers_rss_file_bytes": 0.1 * GB}
    own = {"process/workers_pss_bytes": 4 * GB + 6 * MB * now} if now % 30 < 1 else {}
    return {"process/rss_bytes": 2 * GB, **shared, **own}


def of_others(now: float) -> dict[str, float]:
    used = {"host/memory_total_bytes": 32 * GB, "host/memory_used_bytes": 9 * GB + 6 * MB * now}
    return {"process/rss_bytes": 2 * GB, "process/workers_rss_bytes": 4 * GB, **used}


def test_a_leak_of_ten_mb_a_second_is_told_with_its_figures() -> None:
    job = train(
        80,
        lambda now: {
            "process/rss_bytes": 2 * GB + 10 * MB * now, "host/memory_used_bytes": 20 * GB + 10 * MB * now,
            "host/memory_total_bytes": 32 * GB,
        },
        step_s=0.1,
    )  # fmt: skip
    evidence = job.found.evidence
    assert (evidence["of"], evidence["bytes_per_step"]) == ("processes", pytest.approx(MB, rel=0.02))
    assert evidence["left_s"] == pytest.approx((12 * GB - 10 * MB * job.now_s) / (10 * MB), rel=0.03)


@pytest.mark.parametrize(("epoch", "told_s"), [(2, 33), (1, 61)])
def test_the_sooner_the_machine_is_full_the_sooner_it_is_told(epoch: int, told_s: float) -> None:
    """60 MB a second on a machine with 24 GB, in steps of half a second."""
    used = lambda now: {"process/rss_bytes": GB + 60 * MB * now, "host/memory_used_bytes": 3 * GB + 60 * MB * now}  # noqa: E731
    job = Job(HostMemoryLeak(), steps=every(0.5))
    job.go_on(90, lambda now: {**used(now), "host/memory_total_bytes": 24 * GB}, logged={1: {"batch/epoch": epoch}})
    assert (job.told, job.fired[0].time - START) == ([("warning", "")], pytest.approx(told_s, abs=6))


@pytest.mark.parametrize(
    ("readings", "told"), [(of_workers, ("warning", "loader workers")), (of_others, ("info", "host"))]
)
def test_a_leak_of_workers_or_of_the_host_is_told_as_such(readings: Readings, told: tuple[str, str]) -> None:
    job = train(600, readings)
    assert job.told == [told]
    assert job.found.evidence["bytes_per_hour"] == pytest.approx(3600 * 6 * MB, rel=0.35)


@pytest.mark.parametrize(("grown_mb", "fires"), [(190, False), (600, True)])
def test_a_leak_that_ended_is_resolved_and_a_little_is_none(grown_mb: float, fires: bool) -> None:
    job = train(400, rss(lambda now: 3 * GB + 5 * MB * min(now, grown_mb / 5)))
    assert job.kinds == (["fire", "resolve"] if fires else [])


def test_growth_that_was_given_back_once_must_be_exceeded() -> None:
    """An epoch of 100 s keeps its outputs and drops them at its end; from 600 s on nobody drops them."""
    kept = lambda now: now % 100 if now < 600 else now - 600  # noqa: E731
    job = train(600, rss(lambda now: 3 * GB + 10 * MB * kept(now)), step_s=0.01)
    assert job.kinds == ["fire", "resolve"]
    assert job.go_on(400, rss(lambda now: 3 * GB + 10 * MB * kept(now))).kinds == ["fire", "resolve", "fire"]


def records(seed: int) -> Level:
    """The most that a batch of random size has needed so far."""
    draw, most = random.Random(seed), [0.0]

    def level(_: float) -> float:
        most[0] = max(most[0], *(draw.lognormvariate(0, 0.8) for _ in range(20)))
        return 2 * GB + 0.3 * GB * most[0]

    return level


HEALTHY: dict[str, Level] = {
    "flat": lambda _: 3 * GB,
    "a cache": lambda now: 3 * GB + 2 * GB * (1 - math.exp(-now / 60)),
    "a dataset loaded in 40 s": lambda now: 3 * GB + 8 * GB * min(1.0, now / 40),
    "an evaluation that keeps its outputs": lambda now: 3 * GB + 50 * MB * max(0, now % 120 - 85),
    "allocator": lambda now: 3 * GB + 200 * MB * math.log1p(now),
    "batches of random size": records(1),
}


OTHERS: dict[str, Readings] = {
    "pages of mapped files": lambda now: {
        "process/rss_bytes": 2 * GB + 50 * MB * now, "process/rss_file_bytes": 0.1 * GB + 50 * MB * now,
        "process/workers_rss_bytes": 4 * GB + 200 * MB * now, "process/workers_rss_file_bytes": 1 * GB + 200 * MB * now,
    },
    # what they held when they ended is not sent again
    "workers started anew in each epoch": lambda now: {
        "process/rss_bytes": 2 * GB, **({"process/workers_rss_bytes": 4 * GB + 20 * MB * (now % 70)} if now % 70 < 45 else {}),
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", [*HEALTHY, *OTHERS])
def test_what_ends_falls_back_or_is_of_others_is_no_leak(kind: str) -> None:
    draw = random.Random(1)
    readings = OTHERS.get(kind) or rss(lambda now: HEALTHY[kind](now) + draw.gauss(0, 5 * MB))
    assert train(900, readings, step_s=2).changes == []
