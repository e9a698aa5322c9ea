"""gpu_fragmentation and rank_memory_imbalance, on made-up series."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from over_time import Job, every

from perfagent_server.rules.memory.gpu_fragmentation import GpuFragmentation
from perfagent_server.rules.memory.rank_memory_imbalance import RankMemoryImbalance

GIB = 2.0**30


def device(
    reserved: float, peak: float, *, allocated: float = 5, retries: float = 0
) -> Callable[[float], dict[str, float]]:
    """GiB."""
    return lambda _: {
        "cuda/reserved_bytes": reserved * GIB, "cuda/peak_allocated_bytes": peak * GIB, "cuda/alloc_retries": retries,
        "cuda/allocated_bytes": allocated * GIB, "cuda/inactive_split_bytes": 3 * GIB, "gpu/memory_total_bytes": 80 * GIB,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reserved", "peak", "retries", "severity"),
    [
        (50, 20, 0, "info"),
        (78, 50, 12, "warning"),
        (78, 50, 0, None),  # full, but nobody had to wait for room
        (70, 65, 3, None),  # as good as all of it was needed at once
        (20, 6, 0, None),  # a quarter of the device: there is room
        (60, 45, 0, None),  # a cache between two steps, of which 5 GiB are in use
    ],
)
def test_what_is_reserved_beyond_the_highest_need_lies_in_splinters(
    reserved: float, peak: float, retries: float, severity: str | None
) -> None:
    job = Job(GpuFragmentation(), steps=every(0.2))
    job.go_on(200, device(reserved, peak, retries=retries))
    assert [change.finding.severity for change in job.fired] == ([severity] if severity else [])
    for change in job.fired:
        assert "expandable_segments:True" in change.finding.fix
        assert "3 GiB in split blocks now" in change.finding.message


def test_a_cold_cache_of_the_first_steps_is_no_fragmentation() -> None:
    job = Job(GpuFragmentation(), steps=every(10))
    job.go_on(150, device(50, 20))
    job.go_on(300, device(50, 48))
    assert job.changes == []


def ranks(*peaks: float, total: float = 80) -> Sequence[Callable[[float], dict[str, float]]]:
    return [
        lambda _, peak=peak: {"cuda/peak_allocated_bytes": peak * GIB, "gpu/memory_total_bytes": total * GIB}  # type: ignore[misc]
        for peak in peaks
    ]


@pytest.mark.parametrize(
    ("peaks", "severity"),
    [
        ((70, 40, 40, 41), "warning"),
        ((36, 28, 28, 28), "info"),
        ((41, 40, 40, 40), None),
        ((9, 5, 5, 5), None),  # far from what the device has
        ((60, 50, 40, 30), None),  # stages of a pipeline
        ((60, 60, 40, 40), None),  # two of four: other work
        ((60, 40), "info"),  # perhaps two stages
        ((50, 40, 40, 40, 40, 40, 40, 40), "info"),
    ],
)
def test_few_ranks_that_need_more_than_all_others(peaks: tuple[float, ...], severity: str | None) -> None:
    job = Job(RankMemoryImbalance(), steps=every(0.2), ranks=len(peaks))
    job.go_on(200, *ranks(*peaks))
    assert [change.finding.severity for change in job.fired] == ([severity] if severity else [])
    for change in job.fired:
        assert (change.finding.ranks, change.finding.cause) == ([0], "rank 0")
        assert "map_location" in change.finding.fix


def test_another_rank_is_named_with_its_figures() -> None:
    job = Job(RankMemoryImbalance(), steps=every(0.2), ranks=4)
    job.go_on(200, *ranks(40, 40, 65, 40))
    [change] = job.fired
    assert change.finding.title == "Rank 2 needs 25 GiB more GPU memory than the others"
    assert "rank 2 holds 65 GiB of the 80 GiB of its GPU (81 %); a typical rank holds 40 GiB" in change.finding.message


def test_one_rank_alone_is_not_compared() -> None:
    job = Job(RankMemoryImbalance(), steps=every(0.2))
    job.go_on(200, *ranks(70))
    assert job.changes == []
