"""disk_full: room against what the run writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.disk_full import DiskFull

GB = 1e9
TOTAL = 1000 * GB


def disk(free: Callable[[float], float], *roles: str, total: float = TOTAL) -> Callable[[float], dict[str, float]]:
    def readings(now: float) -> dict[str, float]:
        if now % 10 >= 1:
            return {}
        found = {}
        for role in roles or ("work", "spool", "checkpoint"):
            found[f"disk/{role}_free_bytes"] = free(now)
            found[f"disk/{role}_used_pct"] = 100 * (1 - free(now) / total)
        return found

    return readings


def saving(
    every_s: float, step_s: float = 0.5, size: float | None = None, until_s: float = 1e5
) -> dict[int, dict[str, float]]:
    """What is logged by step when the run saves every so many seconds."""
    told = {"phase/checkpoint_s": 2.0} | ({"checkpoint/saved_bytes": size} if size is not None else {})
    steps = round(every_s / step_s)
    return dict.fromkeys(range(steps, int(until_s / step_s), steps), told)


@pytest.mark.parametrize(("free_gb", "severity"), [(9, "critical"), (15, "warning"), (25, None)])
def test_the_next_checkpoints_must_fit(free_gb: float, severity: str | None) -> None:
    job = Job(DiskFull(), steps=every(0.5))
    job.go_on(200, disk(lambda _: free_gb * GB, total=250 * GB), logged=saving(60, size=10 * GB))
    found = [one for one in job.evaluator.findings() if one.severity != "info"]
    assert [one.severity for one in found] == ([severity] if severity else [])
    for one in found:
        assert (one.cause, one.evidence["role"]) == ("saves", "checkpoint")
        assert f"Room for {free_gb / 10:.1f} more checkpoints of 9.31 GiB" in one.message
        assert "save_total_limit" in one.fix


def test_the_size_of_saves_is_known_from_the_room_they_took() -> None:
    job = Job(DiskFull(), steps=every(0.5), every_s=10.0)
    job.go_on(35_100, disk(lambda now: 100 * GB - 12 * GB * (now // 5000)), logged=saving(5000))
    assert [change.finding.severity for change in job.fired] == ["info"], "it is a guess"
    assert job.evaluator.findings()[0].evidence["save_bytes"] == pytest.approx(12 * GB, rel=0.01)
    assert "11.2 GiB (so much was gone after a save, in the median)" in job.evaluator.findings()[0].message


def test_a_long_save_is_measured_from_before_it_began() -> None:
    """A minute of writing, in which the disk is read six times and no step ends."""

    def free(now: float) -> float:
        return 100 * GB - 12 * GB * (now // 2000 + min(1.0, (now % 2000) / 60) - 1)

    job = Job(DiskFull(), steps=every(0.5), every_s=10.0)
    told = {step + 120: {"phase/checkpoint_s": 60.0} for step in saving(2000)}
    job.go_on(14_100, disk(free), logged=told)
    assert job.evaluator.findings()[0].evidence["save_bytes"] == pytest.approx(12 * GB, rel=0.01)


@pytest.mark.parametrize(
    "free",
    [
        lambda now: 260 * GB - 200 * GB * (now > 250),
        lambda now: 260 * GB - 200 * GB * (now > 602),
        lambda now: 900 * GB - 0.25 * GB * min(now, 3400),
    ],
    ids=["a copy between saves", "a copy at a save", "a steady writer"],
)
def test_what_others_write_to_a_shared_disk_is_no_checkpoint(free: Callable[[float], float]) -> None:
    job = Job(DiskFull(), steps=every(0.5), every_s=2.0)
    job.go_on(3300, disk(free), logged=saving(300))
    assert {one.finding.cause for one in job.fired} <= {"fills up"}
    assert all(one.finding.evidence["save_bytes"] is None for one in job.changes)


def test_a_disk_that_fills_steadily_is_told_with_the_time_that_is_left() -> None:
    job = Job(DiskFull(), steps=every(0.5), every_s=5.0)
    job.go_on(4000, disk(lambda now: 200 * GB - 0.04 * GB * now, "work"))
    [change] = job.fired
    assert (change.finding.severity, change.finding.cause) == ("warning", "fills up")
    assert change.finding.evidence["left_s"] == pytest.approx(3600, rel=0.1)
    job.go_on(500, disk(lambda now: 200 * GB - 0.04 * GB * now, "work"))
    assert job.evaluator.findings()[0].severity == "critical"


@pytest.mark.parametrize(
    "free",
    [
        lambda _: 40 * GB,  # 96 % of a large disk
        lambda now: 300 * GB - 20 * GB * (now % 100 > 50),  # saves that replace each other
        lambda now: 300 * GB - 100 * GB * (now > 200),  # a download
        lambda now: 900 * GB - 0.01 * GB * now,  # a day is left
        lambda now: 300 * GB - 0.2 * GB * min(now, 500),  # the same, slower
    ],
    ids=["large", "replaced", "download", "slow", "slow download"],
)
def test_a_disk_with_room_is_healthy_however_full_it_is(free: Callable[[float], float]) -> None:
    job = Job(DiskFull(), steps=every(0.5), every_s=2.0)
    job.go_on(3000, disk(free, "work", "checkpoint"))
    assert job.changes == []


@pytest.mark.parametrize(
    ("free_gb", "total_gb", "severity"),
    [(15, 200, "info"), (8, 200, "warning"), (0.5, 200, "critical"), (8, 20, None), (30, 2000, None)],
)
def test_next_to_no_room_is_told_also_where_nothing_is_known_of_saves(
    free_gb: float, total_gb: float, severity: str | None
) -> None:
    job = Job(DiskFull(), steps=every(0.5))
    job.go_on(60, disk(lambda _: free_gb * GB, "work", total=total_gb * GB))
    assert [change.finding.severity for change in job.fired] == ([severity] if severity else [])


def test_the_spool_is_ours_and_no_reason_to_wake_anybody() -> None:
    job = Job(DiskFull(), steps=every(0.5))
    job.go_on(60, disk(lambda _: 0.2 * GB, "spool"))
    assert [change.finding.severity for change in job.fired] == ["warning"]


def test_room_that_was_made_resolves_the_alert() -> None:
    job = Job(DiskFull(), steps=every(0.5))
    job.go_on(200, disk(lambda now: (8 if now < 100 else 60) * GB, "work", total=200 * GB))
    assert [change.kind for change in job.changes] == ["fire", "resolve"]
