"""host_memory_leak: named in time whatever its rate, and never what fills up, comes and goes, or is given back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.host_memory_leak import HostMemoryLeak

MB, GB = 1e6, 1e9
Level = Callable[[float], float]


def leaking(step_s: float = 0.05) -> Job:
    return Job(HostMemoryLeak(), steps=every(step_s))


def deadline_s(onset_s: float, mb_per_s: float, step_s: float) -> float:
    """300 steps or 60 s, whichever is later, after 300 MB were added."""
    return onset_s + 300 / mb_per_s + max(60.0, 300 * step_s)


def rss(level: Level) -> Callable[[float], dict[str, float]]:
    return lambda seconds: {"process/rss_bytes": level(seconds)}


@pytest.mark.parametrize("noise_mb", [0, 20])
@pytest.mark.parametrize("onset_s", [4, 400])
@pytest.mark.parametrize(
    ("step_s", "mb_per_s"), [(0.005, 1), (0.005, 8), (0.005, 200), (0.3, 3), (0.3, 50), (1, 10), (10, 0.2), (10, 30)]
)
def test_a_leak_is_named_in_time_whatever_its_rate_and_the_length_of_a_step(
    step_s: float, mb_per_s: float, onset_s: float, noise_mb: float
) -> None:
    draw = random.Random(1)
    job = leaking(step_s)
    job.go_on(
        deadline_s(onset_s, mb_per_s, step_s),
        rss(lambda now: 3 * GB + mb_per_s * MB * max(0.0, now - onset_s) + draw.gauss(0, noise_mb * MB)),
    )
    [change] = job.fired
    found = change.finding
    assert (found.rule, found.severity, found.cause) == ("host_memory_leak", "warning", "")
    assert found.evidence["bytes_per_hour"] == pytest.approx(3600 * mb_per_s * MB, rel=0.35)
    assert abs(found.since_step - onset_s / step_s) <= max(30 / step_s, 0.35 * job.evaluator.window.step)


def test_the_sentence_says_how_much_how_fast_and_how_long_the_memory_lasts() -> None:
    job = leaking(0.1)
    job.go_on(
        80,
        lambda now: {
            "process/rss_bytes": 2 * GB + 10 * MB * now, "host/memory_used_bytes": 20 * GB + 10 * MB * now,
            "host/memory_total_bytes": 32 * GB,
        },
    )  # fmt: skip
    [change] = job.fired
    found = change.finding
    assert found.title == "The memory of the training processes grows by 33.5 GiB an hour"
    assert "steadily and without falling back: 9.54 MiB a second, 977 KiB a step." in found.message
    assert "The host's 29.8 GiB are full in 19 min if it goes on." in found.message
    assert found.evidence["of"] == "processes"


def test_evaluations_that_take_their_own_memory_hide_no_leak() -> None:
    """30 s of 90 in an evaluation that needs 2 GB more, and no step ends meanwhile."""
    trained = lambda now: 60 * (now // 90) + min(60.0, now % 90)  # noqa: E731
    job = Job(HostMemoryLeak(), steps=lambda now: trained(now) / 0.2)
    job.go_on(240, rss(lambda now: 3 * GB + 5 * MB * trained(now) + (2 * GB if now % 90 >= 60 else 0)))
    assert len(job.fired) == 1


@pytest.mark.parametrize("of_workers", [True, False])
def test_a_leak_of_loader_workers_or_of_the_host_is_told_as_such(of_workers: bool) -> None:
    job = leaking(0.05)
    job.go_on(
        deadline_s(30, 6, 0.05),
        lambda now: {
            "process/rss_bytes": 2 * GB, "host/memory_total_bytes": 32 * GB,
            "process/workers_rss_bytes": 4 * GB + (6 * MB * max(0, now - 30) if of_workers else 0),
            "host/memory_used_bytes": 9 * GB + 6 * MB * max(0, now - 30),
        },
    )  # fmt: skip
    [change] = job.fired
    assert change.finding.cause == ("loader workers" if of_workers else "host")
    assert change.finding.severity == ("warning" if of_workers else "info"), "it may be of other programs"
    assert ("__getitem__" if of_workers else "/dev/shm") in change.finding.fix


def test_pages_that_workers_copy_are_a_leak_although_what_is_resident_stays() -> None:
    """Their own memory is measured every half minute only."""
    job = leaking(0.05)
    job.go_on(
        600,
        lambda now: {
            "process/rss_bytes": 2 * GB, "process/workers_rss_bytes": 8 * GB, "process/workers_rss_file_bytes": 0.1 * GB,
            **({"process/workers_pss_bytes": 4 * GB + 6 * MB * now} if now % 30 < 1 else {}),
        },
    )  # fmt: skip
    [change] = job.fired
    assert change.finding.cause == "loader workers"
    assert change.finding.evidence["bytes_per_hour"] == pytest.approx(3600 * 6 * MB, rel=0.35)


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_ranks_together_count(ranks: int) -> None:
    job = Job(HostMemoryLeak(), steps=every(0.1), ranks=ranks)
    flat, grows = rss(lambda _: 3 * GB), rss(lambda now: 3 * GB + 10 * MB * now)
    job.go_on(100, grows, flat)
    assert len(job.fired) == 1


def test_a_leak_that_ended_is_resolved() -> None:
    job = leaking(0.05)
    job.go_on(400, rss(lambda now: 3 * GB + 10 * MB * min(now, 120)))
    assert [change.kind for change in job.changes if change.kind != "update"] == ["fire", "resolve"]


def records(seed: int) -> Level:
    """The most that a batch of random size has needed so far."""
    draw, most = random.Random(seed), [0.0]

    def level(_: float) -> float:
        most[0] = max(most[0], *(draw.lognormvariate(0, 0.8) for _ in range(20)))
        return 2 * GB + 0.3 * GB * most[0]

    return level


HEALTHY: dict[str, Level] = {
    "flat": lambda _: 3 * GB,
    "a small cache": lambda now: 3 * GB + 0.6 * GB * (1 - math.exp(-now / 600)),
    "a cache": lambda now: 3 * GB + 2 * GB * (1 - math.exp(-now / 60)),
    "a large cache": lambda now: 3 * GB + 10 * GB * (1 - math.exp(-now / 100)),
    "a dataset loaded in 40 s": lambda now: 3 * GB + 8 * GB * min(1.0, now / 40),
    "a second model": lambda now: 3 * GB + (2 * GB if now > 100 else 0),
    "jumps": lambda now: 3 * GB + 0.5 * GB * ((now > 100) + (now > 260) + (now > 500)),
    "an evaluation's memory": lambda now: 3 * GB + (2 * GB if now % 120 > 100 else 0),
    "an evaluation that keeps its outputs": lambda now: 3 * GB + 50 * MB * max(0, now % 120 - 85),
    "an evaluation's memory that stays": lambda now: 3 * GB + (2 * GB if now > 100 else 0),
    "copies for saves": lambda now: 3 * GB + (3 * GB if now % 60 < 2 else 0),
    "memory within a step": lambda now: 3 * GB + 2 * GB * abs(math.sin(7.3 * now)),
    "collected in turn": lambda now: 3 * GB + 25 * MB * (now % 40),
    "allocator": lambda now: 3 * GB + 200 * MB * math.log1p(now),
    "batches of random size": records(1),
    "batches of random size again": records(2),
    "little": lambda now: 3 * GB + 0.2 * MB * now,
}


@pytest.mark.parametrize("step_s", [0.01, 2])
@pytest.mark.parametrize("name", HEALTHY)
def test_what_ends_falls_back_or_is_little_is_no_leak(name: str, step_s: float) -> None:
    draw = random.Random(1)
    job = leaking(step_s)
    job.go_on(900, rss(lambda now: HEALTHY[name](now) + draw.gauss(0, 5 * MB)))
    assert job.changes == []


def test_pages_of_mapped_files_are_no_leak() -> None:
    job = leaking(0.01)
    job.go_on(
        300,
        lambda now: {
            "process/rss_bytes": 2 * GB + 50 * MB * now, "process/rss_file_bytes": 0.1 * GB + 50 * MB * now,
            "process/workers_rss_bytes": 4 * GB + 200 * MB * now,
            "process/workers_rss_file_bytes": 1 * GB + 200 * MB * now,
        },
    )  # fmt: skip
    assert job.changes == []


def test_memory_that_grows_before_the_first_step_or_in_an_evaluation_is_no_leak() -> None:
    job = Job(HostMemoryLeak(), steps=lambda now: 20 * max(0, min(now, 500) - 300))
    job.go_on(700, rss(lambda now: GB + 30 * MB * min(now, 300) + 30 * MB * max(0, now - 500)))
    assert job.changes == []


def test_workers_that_are_started_anew_in_each_epoch_are_no_leak() -> None:
    """What they held when they ended is not sent again."""

    def readings(now: float) -> dict[str, float]:
        there = {"process/workers_rss_bytes": 4 * GB + 20 * MB * (now % 70)}
        return {"process/rss_bytes": 2 * GB, **(there if now % 70 < 45 else {})}

    job = leaking(0.01)
    job.go_on(600, readings)
    assert job.changes == []


def test_growth_that_was_given_back_once_is_named_again_only_when_it_is_exceeded() -> None:
    """An epoch of 100 s keeps its outputs and drops them at its end; from 600 s on nobody drops them."""
    kept = lambda now: now % 100 if now < 600 else now - 600  # noqa: E731
    job = leaking(0.01)
    job.go_on(600, rss(lambda now: 3 * GB + 10 * MB * kept(now)))
    assert [change.kind for change in job.changes if change.kind != "update"] == ["fire", "resolve"]
    job.go_on(400, rss(lambda now: 3 * GB + 10 * MB * kept(now)))
    assert [change.kind for change in job.changes if change.kind != "update"] == ["fire", "resolve", "fire"]


def test_other_programs_that_come_and_go_on_the_host_are_no_leak() -> None:
    job = leaking(0.01)
    job.go_on(
        900,
        lambda now: {
            "process/rss_bytes": 2 * GB, "host/memory_total_bytes": 64 * GB,
            "host/memory_used_bytes": 20 * GB + 6 * GB * min(1, now % 200 / 20) * (now % 200 < 150),
        },
    )  # fmt: skip
    assert job.changes == []
