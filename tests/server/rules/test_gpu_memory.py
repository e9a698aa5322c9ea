"""gpu_fragmentation, rank_memory_imbalance and gpu_memory_leak, on made-up series."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

import pytest
from over_time import Job, Readings, every

from perfagent_server.rules.memory.gpu_fragmentation import GpuFragmentation
from perfagent_server.rules.memory.gpu_memory_leak import GpuMemoryLeak
from perfagent_server.rules.memory.rank_memory_imbalance import RankMemoryImbalance

MIB, GIB = 2.0**20, 2.0**30


def device(reserved: float, peak: float, retries: float = 0) -> Readings:
    """GiB of 80."""
    sizes = {"reserved": reserved, "peak_allocated": peak, "allocated": 5, "inactive_split": 3}
    told = {f"cuda/{name}_bytes": size * GIB for name, size in sizes.items()}
    return lambda _: told | {"cuda/alloc_retries": retries, "gpu/memory_total_bytes": 80 * GIB}


@pytest.mark.parametrize(
    ("reserved", "peak", "retries", "severity"),
    [
        (50, 25, 0, "info"), (50, 25.1, 0, None), (24, 8, 0, "info"), (23.9, 8, 0, None),
        (68, 54.4, 1, "warning"), (68, 54.5, 1, None), (67.9, 50, 1, None), (68, 54, 0, None),
    ],
    ids=["twice", "less", "30 % of the device", "there is room", "full", "needed at once", "not full", "nobody waited"],
)  # fmt: skip
def test_memory_reserved_beyond_the_highest_need_is_fragmented(
    reserved: float, peak: float, retries: float, severity: str | None
) -> None:
    job = Job(GpuFragmentation(), steps=every(0.2)).go_on(100, device(reserved, peak, retries))
    assert [one for one, _ in job.told] == ([severity] if severity else [])


def peaks_of(*peaks: float) -> list[Readings]:
    """GiB of 80, by rank."""

    def told(peak: float) -> Mapping[str, float]:
        return {"cuda/peak_allocated_bytes": peak * GIB, "gpu/memory_total_bytes": 80 * GIB}

    return [lambda _, peak=peak: told(peak) for peak in peaks]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("peaks", "severity"),
    [
        ((50, 40, 40, 40), "info"), ((49.9, 40, 40, 40), None), ((60, 42, 42, 42), "warning"), ((60, 42.1, 42.1, 42.1), "info"),
        ((39.9, 20, 20, 20), "info"), ((24, 15, 15, 15), "info"), ((23.9, 15, 15, 15), None), ((70, 40, 42, 44), "warning"),
        ((70, 40, 42, 44.5), None), ((60, 60, 40, 40), None), ((60, 40), "info"), ((50, *[40] * 7), "info"), ((70,), None),
    ],
    ids=[
        "a fifth more", "less", "30 % more", "a little less", "not half of the device", "30 % of it", "far from full",
        "others are alike", "stages", "two of four", "two", "eight", "one alone",
    ],
)  # fmt: skip
def test_few_ranks_that_need_more_than_all_others(peaks: tuple[float, ...], severity: str | None) -> None:
    job = Job(RankMemoryImbalance(), steps=every(0.2), ranks=len(peaks), every_s=3.0).go_on(200, *peaks_of(*peaks))
    assert job.told == ([(severity, "rank 0")] if severity else [])


def test_the_rank_whose_losses_keep_their_graph_is_a_leak() -> None:
    job = Job(GpuMemoryLeak(), steps=every(0.5), ranks=2, every_s=3.0)
    levels: list[Level] = [lambda _: 10 * GIB, lambda now: 10 * GIB + 8 * MIB * now]
    job.go_on(1800, *(between_steps(level, within=5 * GIB, seed=rank) for rank, level in enumerate(levels)))
    assert (job.found.severity, job.found.cause, job.found.ranks) == ("warning", "", [1])
    assert job.found.evidence["bytes_per_step"] == pytest.approx(4 * MIB, rel=0.3)


# ---- gpu_memory_leak: what tensors hold between steps, never what a step needs

Level = Callable[[float], float]


def between_steps(level: Level, *, within: float = 20 * GIB, seed: int = 1) -> Readings:
    """Readings that fall anywhere within a step: between steps only what stays is allocated."""
    draw = random.Random(seed)
    return lambda now: {
        "cuda/allocated_bytes": level(now) + within * draw.random(), "cuda/headroom_bytes": 80 * GIB - level(now) - within,
    }  # fmt: skip


HEALTHY: dict[str, Level] = {
    "flat": lambda _: 10 * GIB,
    "optimizer state comes with the first steps": lambda now: 10 * GIB + (20 * GIB if now > 40 else 0),
    "an average of the weights is kept from some step on": lambda now: 10 * GIB + (5 * GIB if now > 600 else 0),
    "evaluations": lambda now: 10 * GIB + (8 * GIB if now % 300 > 200 else 0),
    "a cache that fills": lambda now: 10 * GIB + 4 * GIB * (1 - math.exp(-now / 120)),
    "outputs of an epoch": lambda now: 10 * GIB + 10 * MIB * (now % 180),
    "little": lambda now: 10 * GIB + 0.1 * MIB * now,
}


@pytest.mark.parametrize("kind", HEALTHY)
def test_what_a_step_needs_ends_or_falls_back_is_no_leak(kind: str) -> None:
    readings = between_steps(HEALTHY[kind])
    assert Job(GpuMemoryLeak(), steps=every(0.3), every_s=3.0).go_on(1800, readings).changes == []
