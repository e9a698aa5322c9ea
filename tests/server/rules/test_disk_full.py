"""disk_full: room against what the run writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.disk_full import DiskFull

GB = 1e9
Free = Callable[[float], float]
"""GB, by the second."""


def filled(
    seconds: float, free: Free, *roles: str, total: float = 1000, every_s: float = 1.0, save_s: float = 0, size: float = 0,
) -> Job:  # fmt: skip
    """A job beside disks of `total` GB, which are read every ten seconds; a step takes half a second. save_s: seconds from one
    checkpoint to the next; size: GB of a checkpoint, if the agent reports it."""

    def readings(now: float) -> dict[str, float]:
        told = {"free_bytes": free(now) * GB, "used_pct": 100 * (1 - free(now) / total)} if now % 10 < 1 else {}
        return {
            f"disk/{role}_{name}": value
            for role in roles or ("work", "spool", "checkpoint")
            for name, value in told.items()
        }

    save = {"phase/checkpoint_s": 2.0} | ({"checkpoint/saved_bytes": size * GB} if size else {})
    every_steps = round(2 * save_s)
    logged = dict.fromkeys(range(every_steps, 200000, every_steps), save) if save_s else {}
    return Job(DiskFull(), steps=every(0.5), every_s=every_s).go_on(seconds, readings, logged=logged)


@pytest.mark.parametrize(
    ("free_gb", "told"),
    [(9.9, [("critical", "saves")]), (10.1, [("warning", "saves")]), (19.9, [("warning", "saves")]), (25, [])],
)
def test_the_next_checkpoints_must_fit(free_gb: float, told: list[tuple[str, str]]) -> None:
    job = filled(200, lambda _: free_gb, total=60, save_s=60, size=10)
    assert job.told == told
    if told:
        assert job.evaluator.findings()[0].evidence["role"] == "checkpoint"


@pytest.mark.parametrize(
    ("seconds", "severities"), [(1320, []), (1480, ["warning"]), (3890, ["warning"]), (3950, ["critical"])]
)
def test_a_disk_that_fills_steadily_is_told_with_the_time_left(seconds: float, severities: list[str]) -> None:
    """200 GB are full in 5,000 s: an hour is left from 1,400 s on; of an open alert 1,080 s are little."""
    job = filled(seconds, lambda now: 200 - 0.04 * now, "work", every_s=5.0)
    assert job.now_open == [(severity, "fills up") for severity in severities]
    if severities:
        assert job.evaluator.findings()[0].evidence["left_s"] == pytest.approx(5000 - seconds, rel=0.02)


@pytest.mark.parametrize(
    "free",
    [
        lambda _: 40, lambda now: 300 - 20 * (now % 100 > 50), lambda now: 300 - 100 * (now > 200),
        lambda now: 900 - 0.01 * now, lambda now: 300 - 0.2 * min(now, 500),
    ],
    ids=["96 % of a large one", "saves that replace each other", "a download", "a day is left", "a slow download"],
)  # fmt: skip
def test_a_disk_with_room_is_healthy_however_full_it_is(free: Free) -> None:
    assert filled(3000, free, "work", "checkpoint", every_s=2.0).changes == []


@pytest.mark.parametrize(
    ("free_gb", "total_gb", "severity"),
    [
        (19.9, 199, "info"), (19.9, 198, None), (20, 300, None), (9.9, 198, "warning"), (10, 200, "info"), (0.9, 90, "critical"),
        (0.9, 89, "warning"), (1, 200, "warning"),
    ],
)  # fmt: skip
def test_next_to_no_room_is_told_where_nothing_is_known_of_saves(
    free_gb: float, total_gb: float, severity: str | None
) -> None:
    assert filled(60, lambda _: free_gb, "work", total=total_gb).told == ([(severity, "")] if severity else [])


def test_room_that_was_made_resolves_the_alert() -> None:
    assert filled(200, lambda now: 8 if now < 100 else 11, "work", total=220).now_open == [("warning", "")]
    assert filled(200, lambda now: 8 if now < 100 else 60, "work", total=200).kinds == ["fire", "resolve"]
    assert filled(60, lambda _: 0.2, "spool").told == [("warning", "")], "the spool is ours, and wakes nobody"
