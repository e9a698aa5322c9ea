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
from torch.utils.data import DataLoader, Dataset

from perfagent_loop.search import workers as subject
from perfagent_loop.search.workers import find_num_workers, search_num_workers


class Slow(Dataset[int]):
    """Each sample waits, and needs no processor meanwhile. With 0 it is there at once: even `sleep(0)` takes 60 µs."""

    def __init__(self, wait_s: float, length: int = 512) -> None:
        self.wait_s, self.length = wait_s, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if self.wait_s:
            time.sleep(self.wait_s)
        return index


def loader_of(data: Dataset[int], **options: Any) -> Any:
    return lambda workers: DataLoader(data, batch_size=8, num_workers=workers, **options)


class Timed:
    """A loader with a clock of its own. A worker needs 80 ms for a batch. batch_s: the time between two batches, if it
    is given."""

    prefetch_factor = 2
    clock_s = 0.0

    def __init__(self, workers: int, batch_s: float | None = None) -> None:
        self._workers = workers
        self._batch_s = 0.08 / max(1, workers) if batch_s is None else batch_s

    def __iter__(self) -> Iterator[int]:
        yield from range(1 + self.prefetch_factor * self._workers)  # these are there when the first one is
        while True:
            Timed.clock_s += self._batch_s
            yield 0


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "time", SimpleNamespace(perf_counter=lambda: Timed.clock_s))


@pytest.mark.usefixtures("timed")
def test_data_that_waits_gets_workers() -> None:
    found, trials = search_num_workers(Timed, [0, 1, 4], batches=8, most_s=3.0)
    assert found == 4
    assert [(trial.workers, trial.seconds) for trial in trials] == [
        (0, pytest.approx(0.08)),
        (1, pytest.approx(0.08)),
        (4, pytest.approx(0.02)),
    ]


@pytest.mark.real
def test_workers_are_tried_and_nothing_is_left_of_them() -> None:
    before = torch.get_rng_state(), random.getstate()
    _, trials = search_num_workers(loader_of(Slow(0.01), shuffle=True), [0, 1, 4], batches=8, most_s=3.0)
    assert [trial.workers for trial in trials] == [0, 1, 4]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert not multiprocessing.active_children()


@pytest.mark.real
def test_data_that_is_there_already_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the CPU time of this process, which other programs do not take: a worker's batch costs ten times as much."""
    monkeypatch.setattr(subject, "time", SimpleNamespace(perf_counter=time.process_time))
    assert find_num_workers(loader_of(Slow(0.0)), [0, 2], batches=40, most_s=1.0) == 0


def test_the_fewest_workers_that_keep_up_are_chosen() -> None:
    found, trials = search_num_workers(loader_of(Slow(0.01)), [0, 1, 4, 8], batches=6, most_s=3.0, step_s=60.0)
    assert found == 0
    assert len(trials) == 1  # that was enough


@pytest.mark.usefixtures("timed")
def test_more_that_brings_nothing_ends_the_search() -> None:
    took = {0: 0.08, 1: 0.04, 2: 0.039, 3: 0.04, 4: 0.01}
    _, trials = search_num_workers(lambda workers: Timed(workers, took[workers]), [*took], batches=8, most_s=3.0)
    assert [trial.workers for trial in trials] == [0, 1, 2, 3]


class Starved(Dataset[int]):
    """Works in the main process only."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        if torch.utils.data.get_worker_info() is not None:
            raise RuntimeError("unable to open shared memory object in read-write mode")
        return index


@pytest.mark.real
def test_workers_that_cannot_start_are_left_out() -> None:
    found, trials = search_num_workers(loader_of(Starved()), [0, 2, 4], batches=4, most_s=1.0)
    assert found == 0
    assert [trial.seconds is None for trial in trials] == [False, True]
    assert "shared memory" in trials[1].error or "worker" in trials[1].error
    with pytest.raises(RuntimeError, match="shared memory"):
        find_num_workers(loader_of(Starved()), [2], batches=4, most_s=1.0)
