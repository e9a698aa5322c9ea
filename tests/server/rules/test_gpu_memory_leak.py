"""gpu_memory_leak, on made-up series: what tensors hold between steps, never what a step needs."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.gpu_memory_leak import GpuMemoryLeak

MIB, GIB = 2.0**20, 2.0**30
Level = Callable[[float], float]


def device(between: Level, *, within: float = 20 * GIB, total: float = 80 * GIB, seed: int = 1) -> Level:
    """Readings that fall anywhere within a step: between steps only what stays is allocated."""
    draw = random.Random(seed)

    def readings(now: float) -> dict[str, float]:
        allocated = between(now) + within * draw.random()
        return {"cuda/allocated_bytes": allocated, "cuda/headroom_bytes": total - between(now) - within}

    return readings  # type: ignore[return-value]


def test_losses_kept_with_their_graph_are_a_leak_with_the_time_that_is_left() -> None:
    job = Job(GpuMemoryLeak(), steps=every(0.2))
    job.go_on(900, device(lambda now: 10 * GIB + 4 * MIB * now))  # type: ignore[arg-type]
    [change] = job.fired
    found = change.finding
    assert (found.rule, found.severity) == ("gpu_memory_leak", "warning")
    assert "What tensors hold between steps grew from" in found.message
    assert "The memory of the device is full in" in found.message
    assert found.evidence["bytes_per_step"] == pytest.approx(0.8 * MIB, rel=0.3)
    assert "loss.item()" in found.fix


def test_the_rank_that_leaks_is_named_among_eight() -> None:
    job = Job(GpuMemoryLeak(), steps=every(0.5), ranks=8, every_s=3.0)
    flat = [device(lambda _: 10 * GIB, within=5 * GIB, seed=rank) for rank in range(8)]
    flat[3] = device(lambda now: 10 * GIB + 8 * MIB * now, within=5 * GIB, seed=3)
    job.go_on(2400, *flat)  # type: ignore[arg-type]
    [change] = job.fired
    assert change.finding.ranks == [3]
    assert "on rank 3 between steps" in change.finding.message


HEALTHY: dict[str, Level] = {
    "flat": lambda _: 10 * GIB,
    "optimizer state comes with the first steps": lambda now: 10 * GIB + (20 * GIB if now > 40 else 0),
    "an average of the weights is kept from some step on": lambda now: 10 * GIB + (5 * GIB if now > 600 else 0),
    "evaluations": lambda now: 10 * GIB + (8 * GIB if now % 300 > 200 else 0),
    "a cache that fills": lambda now: 10 * GIB + 4 * GIB * (1 - math.exp(-now / 120)),
    "outputs of an epoch": lambda now: 10 * GIB + 10 * MIB * (now % 180),
    "little": lambda now: 10 * GIB + 0.1 * MIB * now,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_a_step_needs_what_ends_and_what_falls_back_is_no_leak(name: str) -> None:
    job = Job(GpuMemoryLeak(), steps=every(0.3), every_s=2.0)
    job.go_on(2400, device(HEALTHY[name]))  # type: ignore[arg-type]
    assert job.changes == []


def test_batches_that_get_longer_are_no_leak() -> None:
    """A curriculum: the activations of a step grow, and what stays after it does not."""
    draw = random.Random(1)
    job = Job(GpuMemoryLeak(), steps=every(0.3), every_s=2.0)
    job.go_on(1800, lambda now: {"cuda/allocated_bytes": 10 * GIB + (5 + now / 100) * GIB * draw.random()})
    assert job.changes == []
