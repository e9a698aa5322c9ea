"""oom_imminent: the host's memory as it rises, and GPUs on made-up series."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from over_time import Job, Readings, every

from perfagent_server.rules.memory.host_memory_leak import HostMemoryLeak
from perfagent_server.rules.memory.oom_imminent import OomImminent

MB, GB, GIB = 1e6, 1e9, 2.0**30


def host(used: float, own: float = 4.0) -> dict[str, float]:
    """GB of 16."""
    return {"host/memory_used_bytes": used * GB, "host/memory_total_bytes": 16 * GB, "process/rss_bytes": own * GB}


def gpu(
    reserved: float, live: float | None = None, *, used: float | None = None, retries: float = 0
) -> Mapping[str, float]:
    """GiB of 80."""
    found = {
        "gpu/memory_total_bytes": 80 * GIB, "cuda/reserved_bytes": reserved * GIB, "cuda/alloc_retries": retries,
        "gpu/memory_used_bytes": (reserved + 0.5 if used is None else used) * GIB,
    }  # fmt: skip
    return found if live is None else {**found, "cuda/allocated_bytes": live * GIB}


def job(seconds: float, *readings: Readings, step_s: float = 0.2, ranks: int = 1) -> Job:
    return Job(OomImminent(), steps=every(step_s), ranks=ranks).go_on(seconds, *readings)


@pytest.mark.parametrize(("own", "cause"), [(4.0, "host memory"), (0.3, "others on the host")])
def test_a_host_that_fills_up_is_told_with_the_time_left(own: float, cause: str) -> None:
    made = job(140, lambda now: host(8 + 0.05 * now, own + 0.05 * now if own > 1 else own))
    found = made.found
    assert (found.severity, found.cause) == ("critical", cause)
    left_s = (16 * GB - found.evidence["used_bytes"]) / (50 * MB)
    assert found.evidence["left_s"] == pytest.approx(left_s, rel=0.1)


def test_a_leak_is_told_by_its_rule_and_the_end_by_this_one() -> None:
    made = Job(HostMemoryLeak(), OomImminent(), steps=every(0.05))
    filling: Readings = lambda now: host(12.5 + 0.004 * now, 4 + 0.004 * now)  # noqa: E731
    assert [change.finding.rule for change in made.go_on(260, filling).fired] == ["host_memory_leak"]
    assert [change.finding.rule for change in made.go_on(240, filling).fired] == ["host_memory_leak", "oom_imminent"]
    assert made.evaluator.verdict().rule == "oom_imminent"


@pytest.mark.parametrize(
    "used",
    [
        lambda _: 15, lambda now: 4 + 0.1 * min(now, 60), lambda now: 13 + 1.5 * (now % 60 > 50),
        lambda now: 8 + 0.01 * min(now, 200), lambda now: 13 + 0.001 * (now % 30),
    ],
    ids=["full of others", "a dataset", "evaluations", "far from full", "noise"],
)  # fmt: skip
def test_a_host_without_an_end_in_sight_is_not_running_out(used: Callable[[float], float]) -> None:
    assert job(400, lambda now: host(used(now))).changes == []


@pytest.mark.parametrize(
    ("used", "own", "severities"),
    [(15.53, 12.0, ["warning"]), (15.51, 12.0, []), (15.6, 4.7, ["warning"]), (15.6, 4.6, [])],
    ids=["97 %", "less", "30 % of it", "of others"],
)
def test_a_host_that_this_run_fills_to_the_brim_is_a_warning(used: float, own: float, severities: list[str]) -> None:
    made = job(100, lambda _: host(used, own))
    assert [severity for severity, _ in made.told] == severities
    if severities and own > 5:
        made.go_on(100, lambda now: host(used + 0.001 * max(0, now - 100), own))
        assert made.now_open == [("critical", "host memory")], "while it rises"


@pytest.mark.parametrize(
    ("readings", "seconds", "step_s", "told"),
    [
        (lambda _: gpu(79, 78.8), 101, 2.0, []),
        (lambda _: gpu(79, 78.8), 125, 2.0, [("warning", "")]),
        (lambda now: gpu(78, (30 + 20 * (now % 3)) / 2), 300, 0.2, []),
        (lambda _: gpu(78.5), 100, 0.2, [("warning", "")]),
        (lambda _: gpu(30, 28, used=79), 100, 0.2, [("info", "others on the GPU")]),
    ],
    ids=["48 steps", "60", "the caching allocator at work", "what is live is unknown", "other processes"],
)
def test_a_full_gpu_is_told_after_fifty_steps(
    readings: Readings, seconds: float, step_s: float, told: list[tuple[str, str]]
) -> None:
    assert job(seconds, readings, step_s=step_s).told == told


@pytest.mark.parametrize(("live", "severity"), [(73.5, None), (73.7, "info"), (77.5, "info"), (77.7, "warning")])
def test_what_is_live_at_the_peak_of_a_step_counts(live: float, severity: str | None) -> None:
    """92 and 97 % of the device."""
    made = job(200, lambda now: gpu(79.2, live if now % 5 < 1 else 20, used=79.2))
    assert [one for one, _ in made.told] == ([severity] if severity else [])


@pytest.mark.parametrize(("reserved", "severity"), [(73, None), (73.2, "warning"), (77, "warning"), (77.2, "critical")])
def test_retries_of_allocations_are_told_where_memory_is_full(reserved: float, severity: str | None) -> None:
    """0.5 GiB are taken besides: 92 and 97 % of the device."""
    made = job(60, lambda _: gpu(reserved, 50, retries=7))
    assert made.changes == [], "what was counted before is the past"
    made.go_on(60, lambda now: gpu(reserved, 50, retries=7 + int(now - 60) // 10))
    assert made.told == ([(severity, "retries")] if severity else [])
    assert made.go_on(800, lambda _: gpu(reserved, 50, retries=13)).now_open == []


@pytest.mark.parametrize(("gib_per_s", "severity"), [(0.01, "warning"), (0.03, "critical")])
def test_tensors_that_grow_are_told_with_the_time_left(gib_per_s: float, severity: str) -> None:
    made = job(
        420, lambda _: gpu(50, 40), lambda now: gpu(min(79, 64 + gib_per_s * now), 62 + gib_per_s * now), ranks=2
    )
    found = made.found
    assert (found.severity, found.cause, found.ranks) == (severity, "leak", [1])
    left = 80 * (1 - found.evidence["live_pct"] / 100)
    assert found.evidence["left_s"] == pytest.approx(left / gib_per_s, rel=0.1)
