"""oom_imminent: the host's memory as it rises, and GPUs on made-up series."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.host_memory_leak import HostMemoryLeak
from perfagent_server.rules.memory.oom_imminent import OomImminent

MB, GB, GIB = 1e6, 1e9, 2.0**30


def host(used: float, *, total: float = 16 * GB, own: float = 4 * GB) -> dict[str, float]:
    return {"host/memory_used_bytes": used, "host/memory_total_bytes": total, "process/rss_bytes": own}


def gpu(
    reserved: float,
    allocated: float | None = None,
    *,
    total: float = 80 * GIB,
    used: float | None = None,
    retries: float = 0,
) -> Mapping[str, float]:
    found = {
        "gpu/memory_total_bytes": total, "cuda/reserved_bytes": reserved, "cuda/alloc_retries": retries,
        "gpu/memory_used_bytes": reserved + GIB / 2 if used is None else used,
    }  # fmt: skip
    return found if allocated is None else {**found, "cuda/allocated_bytes": allocated}


# --- host -----------------------------------------------------------------------------------------------------------------


def test_a_host_that_fills_up_is_told_with_the_time_that_is_left() -> None:
    job = Job(OomImminent(), steps=every(0.1))
    job.go_on(140, lambda now: host(8 * GB + 50 * MB * now, own=4 * GB + 50 * MB * now))
    [change] = job.fired
    found = change.finding
    assert (found.rule, found.severity, found.cause) == ("oom_imminent", "critical", "host memory")
    left = found.evidence["left_s"]
    assert left == pytest.approx((16 * GB - found.evidence["used_bytes"]) / (50 * MB), rel=0.1)
    assert "that are left last about" in found.message
    assert job.now_s < 8 * GB / (50 * MB)


def test_growth_that_is_not_this_runs_is_told_as_such() -> None:
    job = Job(OomImminent(), steps=every(0.1))
    job.go_on(140, lambda now: host(8 * GB + 50 * MB * now, own=GB))
    [change] = job.fired
    assert change.finding.cause == "others on the host"


def test_a_leak_with_time_left_is_told_by_the_rule_on_leaks_and_the_end_by_this_one() -> None:
    job = Job(HostMemoryLeak(), OomImminent(), steps=every(0.05))
    job.go_on(260, lambda now: host(12.5 * GB + 4 * MB * now, own=4 * GB + 4 * MB * now))
    assert [change.finding.rule for change in job.fired] == ["host_memory_leak"]
    job.go_on(240, lambda now: host(12.5 * GB + 4 * MB * now, own=4 * GB + 4 * MB * now))
    assert [change.finding.rule for change in job.fired] == ["host_memory_leak", "oom_imminent"]
    assert job.evaluator.verdict().rule == "oom_imminent"


@pytest.mark.parametrize(
    "used",
    [
        lambda _: 15 * GB,  # of it 11 GB by others, and steady
        lambda now: 4 * GB + 100 * MB * min(now, 60),  # a dataset is loaded
        lambda now: 13 * GB + 1.5 * GB * (now % 60 > 50),  # evaluations
        lambda now: 8 * GB + 10 * MB * min(now, 200),
        lambda now: 13 * GB + MB * (now % 30),
    ],
    ids=["full of others", "dataset", "evaluations", "far from full", "noise"],
)
def test_a_host_that_is_full_or_fills_without_end_in_sight_is_not_running_out(used: object) -> None:
    job = Job(OomImminent(), steps=every(0.1))
    job.go_on(600, lambda now: host(used(now)))  # type: ignore[operator]
    assert job.changes == []


def test_a_host_that_this_run_fills_to_the_brim_is_a_warning_and_critical_while_it_rises() -> None:
    job = Job(OomImminent(), steps=every(0.1))
    job.go_on(100, lambda _: host(15.6 * GB, own=12 * GB))
    [change] = job.fired
    assert (change.finding.severity, "381 MiB" in change.finding.title) == ("warning", True)
    job.go_on(100, lambda now: host(15.6 * GB + MB * max(0, now - 100), own=12 * GB))
    assert job.evaluator.findings()[0].severity == "critical"


def test_nothing_is_said_before_the_first_step() -> None:
    job = Job(OomImminent(), steps=lambda _: 0)
    job.go_on(200, lambda now: host(8 * GB + 35 * MB * now))
    assert job.changes == []


# --- GPU ------------------------------------------------------------------------------------------------------------------


def test_reserved_memory_alone_is_the_caching_allocator_at_work() -> None:
    job = Job(OomImminent(), steps=every(0.2))
    job.go_on(300, lambda now: gpu(78 * GIB, (30 + 20 * (now % 3)) * GIB / 2))
    assert job.changes == []


@pytest.mark.parametrize(("live_gib", "severity"), [(70, None), (75, "info"), (79, "warning")])
def test_what_is_live_at_the_peak_of_a_step_counts(live_gib: float, severity: str | None) -> None:
    job = Job(OomImminent(), steps=every(0.2))
    job.go_on(200, lambda now: gpu(79.2 * GIB, (live_gib if now % 5 < 1 else 20) * GIB, used=79.4 * GIB))
    assert [change.finding.severity for change in job.fired] == ([severity] if severity else [])


def test_the_level_must_hold_for_fifty_steps() -> None:
    job = Job(OomImminent(), steps=every(2))
    job.go_on(95, lambda _: gpu(79 * GIB, 78.8 * GIB))
    assert job.changes == []
    job.go_on(60, lambda _: gpu(79 * GIB, 78.8 * GIB))
    assert len(job.fired) == 1


def test_where_nobody_tells_what_is_live_all_that_is_reserved_may_be() -> None:
    job = Job(OomImminent(), steps=every(0.2))
    job.go_on(100, lambda _: gpu(78.5 * GIB))
    assert [change.finding.severity for change in job.fired] == ["warning"]


@pytest.mark.parametrize(("reserved_gib", "severity"), [(60, None), (75, "warning"), (79, "critical")])
def test_allocations_that_had_to_empty_the_cache_first(reserved_gib: float, severity: str | None) -> None:
    job = Job(OomImminent(), steps=every(0.2))
    job.go_on(60, lambda _: gpu(reserved_gib * GIB, 50 * GIB, retries=7))
    assert job.changes == [], "what was counted before is the past"
    job.go_on(60, lambda now: gpu(reserved_gib * GIB, 50 * GIB, retries=7 + int(now - 60) // 10))
    assert [change.finding.severity for change in job.fired] == ([severity] if severity else [])
    job.go_on(500, lambda _: gpu(reserved_gib * GIB, 50 * GIB, retries=13))
    assert not job.evaluator.findings()


@pytest.mark.parametrize(("gib_per_s", "severity"), [(0.01, "warning"), (0.03, "critical")])
def test_tensors_that_grow_are_told_with_the_time_that_is_left(gib_per_s: float, severity: str) -> None:
    job = Job(OomImminent(), steps=every(0.2), ranks=2)
    flat = lambda _: gpu(50 * GIB, 40 * GIB)  # noqa: E731
    job.go_on(420, flat, lambda now: gpu(min(79, 64 + gib_per_s * now) * GIB, (62 + gib_per_s * now) * GIB))
    [change] = job.fired
    found = change.finding
    assert (found.severity, found.cause, found.ranks) == (severity, "leak", [1])
    assert found.title.startswith("GPU memory of rank 1 is full in about ")
    left = found.evidence["left_s"]
    assert left == pytest.approx(
        found.evidence["total_bytes"] * (1 - found.evidence["live_pct"] / 100) / (gib_per_s * GIB), rel=0.1
    )


def test_memory_of_other_processes_is_named() -> None:
    job = Job(OomImminent(), steps=every(0.2))
    job.go_on(100, lambda _: gpu(30 * GIB, 28 * GIB, used=79 * GIB))
    [change] = job.fired
    assert change.finding.cause == "others on the GPU"
    assert "48 GiB of them by other processes" in change.finding.message
