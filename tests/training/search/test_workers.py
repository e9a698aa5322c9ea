"""The finder of DataLoader workers, on data that waits as a disk or a network makes it wait."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from perfagent_loop.search import workers as subject
from perfagent_loop.search.workers import find_num_workers, search_num_workers


class Timed:
    """A loader with a clock of its own, and seconds from one batch to the next by the number of workers."""

    prefetch_factor = 2
    clock_s = 0.0

    def __init__(self, batch_s: float, workers: int) -> None:
        self._workers, self._batch_s = workers, batch_s

    def __iter__(self) -> Iterator[int]:
        yield from range(1 + self.prefetch_factor * self._workers)  # these are there when the first one is
        while True:
            Timed.clock_s += self._batch_s
            yield 0


@pytest.mark.parametrize(
    ("seconds", "step_s", "found", "tried"),
    [
        ({0: 0.08, 1: 0.08, 4: 0.02}, None, 4, [0, 1, 4]),
        ({0: 0.08, 1: 0.04, 2: 0.039, 3: 0.04, 4: 0.01}, None, 1, [0, 1, 2, 3]),  # more that brings nothing ends it
        ({0: 0.08, 1: 0.04, 4: 0.02}, 60.0, 0, [0]),  # the fewest that keep up
    ],
)
def test_the_fewest_workers_that_are_fast_enough_are_found(
    seconds: dict[int, float], step_s: float | None, found: int, tried: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "time", SimpleNamespace(perf_counter=lambda: Timed.clock_s))
    answer, trials = search_num_workers(
        lambda workers: Timed(seconds[workers], workers), [*seconds], batches=8, most_s=3.0, step_s=step_s
    )
    assert (answer, [trial.workers for trial in trials]) == (found, tried)
    assert [trial.seconds for trial in trials] == pytest.approx([seconds[workers] for workers in tried])


class Starved(list[int]):
    """Works in the main process only."""

    def __getitem__(self, index: Any) -> Any:
        if get_worker_info() is not None:
            raise RuntimeError("unable to open shared memory object in read-write mode")
        return super().__getitem__(index)


NUMBERS = [*range(512)]


def loader_of(data: Any) -> Any:
    return lambda workers: DataLoader(data, batch_size=8, shuffle=True, num_workers=workers)


@pytest.mark.real
def test_data_that_is_there_needs_none_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU time of this process, which other programs do not take: a worker's batch costs ten times as much."""
    monkeypatch.setattr(subject, "time", SimpleNamespace(perf_counter=time.process_time))
    before = torch.get_rng_state(), random.getstate()
    assert find_num_workers(loader_of(NUMBERS), [0, 2], batches=40, most_s=1.0) == 0
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not multiprocessing.active_children()


@pytest.mark.real
def test_workers_that_cannot_start_are_left_out() -> None:
    found, trials = search_num_workers(loader_of(Starved(NUMBERS)), [0, 2, 4], batches=4, most_s=1.0)
    assert found == 0
    assert [trial.seconds is None for trial in trials] == [False, True]
    assert "shared memory" in trials[1].error or "worker" in trials[1].error
    with pytest.raises(RuntimeError, match="shared memory"):
        find_num_workers(loader_of(Starved(NUMBERS)), [2], batches=4, most_s=1.0)
