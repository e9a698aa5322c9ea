"""sync_bound: values of tensors that are read one by one. On a GPU: made-up series, not yet seen on a card."""

from __future__ import annotations

from typing import Any

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.sync_bound import SyncBound
from perfagent_server.rules.speed.unmeasured_time import UnmeasuredTime

LINES = [{"line": "train.py:97", "count": 1000}, {"line": "train.py:98", "count": 24}]


def job(other_s: float, *, busy_pct: float | None = None, forward_s: float = 0.05) -> TimedJob:
    made = TimedJob(SyncBound(), UnmeasuredTime())
    for _ in range(30):
        made.train(10, {"forward": forward_s, "other": other_s})
        if busy_pct is not None:
            made.read(gpu__utilization_pct=busy_pct)
    return made


def told(
    made: TimedJob, other_s: float, calls: float, reading_s: float | None = None, *, forward_s: float = 0.05
) -> list[Any]:
    """What is found 200 steps after the agent told what it found in a sampled step."""
    on_cpu = {"sync/reads_per_step": calls, "sync/reading_s": reading_s or 0.0}
    made.tell({"sync/calls_per_step": calls} if reading_s is None else on_cpu)
    made.event("sync", {"lines": LINES})
    made.train(200, {"forward": forward_s, "other": other_s})
    return made.found("sync_bound")


@pytest.mark.parametrize(
    ("other_s", "busy_pct", "forward_s", "calls", "reading_s", "share_pct"),
    [
        (0.03, None, 0.05, 1024, 0.028, 35.0),
        (0.03, None, 0.05, 1024, 0.0081, 10.125),
        (0.03, None, 0.05, 300, 0.0079, None),
        (0.01, None, 0.05, 1, 2e-6, None),  # the loss in every step
        (0.01, None, 0.05, 0, 0.0, None),
        (0.012, None, 0.05, 1024, 0.5, 100 * 0.05 / 0.062),  # no longer than the part that it may be in: forward
        # on a GPU they cost what it idles
        (0.02, 60.0, 0.05, 3, None, 100 * 0.02 / 0.07),  # the time in no phase
        (0.0, 55.0, 0.2, 48, None, 45.0),  # within the forward pass they show as idle time
        (0.0, 55.0, 0.2, 5, None, 45.0),
        (0.0, 55.0, 0.2, 4, None, None),
        (0.02, 97.0, 0.2, 1, None, None),
        (0.002, 85.0, 0.2, 1, None, None),
        (0.0, 90.5, 0.2, 60, None, None),
    ],
)
def test_reads_are_told_by_their_time(
    other_s: float,
    busy_pct: float | None,
    forward_s: float,
    calls: float,
    reading_s: float | None,
    share_pct: float | None,
) -> None:
    found = told(job(other_s, busy_pct=busy_pct, forward_s=forward_s), other_s, calls, reading_s, forward_s=forward_s)
    severity = None if share_pct is None else "warning" if share_pct >= 20 else "info"
    assert [one.severity for one in found] == ([severity] if severity else [])
    for one in found:
        assert (one.evidence["share_pct"], one.evidence["calls_per_step"]) == (pytest.approx(share_pct), calls)
        assert one.evidence["lines"] == LINES


def test_it_replaces_unmeasured_time_and_heals_at_the_next_look() -> None:
    made = job(0.03)
    assert [one.severity for one in made.found("unmeasured_time")] == ["info"]
    told(made, 0.03, 1024, 0.028)
    made.restart_server()
    for seconds in (60, 60):
        made.train(200, {"forward": 0.05, "other": 0.03})
        made.wait(seconds)
    made.train(1, {"forward": 0.05, "other": 0.03})
    assert made.evaluator.window.firing == {"sync_bound"}
    for _ in range(2):
        told(made, 0.001, 0, 0.0)
        made.wait(60)
    made.train(1, {"forward": 0.05, "other": 0.001})
    kinds = [change.kind for change in made.changes if change.finding.rule == "sync_bound" and change.kind != "update"]
    assert kinds == ["fire", "resolve"]
