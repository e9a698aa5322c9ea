"""Batches of workers: letting go of one is part of waiting for the next, and nothing is held longer than the loop holds it."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfagent.governor import Governor
from perfagent.hooks.account import DATA, FORWARD
from perfagent.hooks.progress import Progress, now, state
from perfagent.hooks.release import SharedBatches

LOADER = 7


@pytest.fixture
def progress(monkeypatch: pytest.MonkeyPatch) -> Progress:
    made = Progress([], Governor(0.5))  # type: ignore[arg-type]
    monkeypatch.setattr(state, "current", made)
    return made


def fetched(p: Progress, batches: SharedBatches, batch: object) -> int:
    """As the hook does; the answer is when the wait seemed to end."""
    batches.watch(batch)
    began = ended = now()
    p.trace.append((DATA, began, ended, LOADER, (2, 0, False)))
    return ended


def pair() -> list[torch.Tensor]:
    return [torch.zeros(4), torch.ones(4)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may do something else between two lines of a test."""
    monkeypatch.setattr("perfagent.hooks.release._AT_ONCE_NS", 10**10)


@pytest.mark.usefixtures("patient")
def test_the_wait_lasts_until_all_tensors_of_the_batch_before_are_gone(progress: Progress) -> None:
    batches = SharedBatches(progress, LOADER)
    x, y = batch = pair()
    fetched(progress, batches, batch)
    del batch
    new = pair()
    ended = fetched(progress, batches, new)
    x = new[0]
    once = progress.trace[-1][2]
    y = new[1]
    twice = progress.trace[-1]
    assert ended < once < twice[2]
    assert twice == (DATA, ended, twice[2], LOADER, (2, 0, False))
    del x, y


@pytest.mark.usefixtures("patient")
def test_tensors_are_found_in_nested_batches(progress: Progress) -> None:
    batches = SharedBatches(progress, LOADER)
    batch = {"inputs": pair(), "labels": torch.zeros(1), "names": ["a", "b"]}
    fetched(progress, batches, batch)
    assert len(batches._newest) == 3
    fetched(progress, batches, torch.zeros(1))
    ended = progress.trace[-1][2]
    batch = {}
    assert progress.trace[-1][2] > ended
    assert not batches._before


def test_what_the_loop_does_with_the_new_batch_is_its_own_time(progress: Progress) -> None:
    batches = SharedBatches(progress, LOADER)
    old = pair()
    fetched(progress, batches, old)
    new = pair()
    ended = fetched(progress, batches, new)
    new[0] = new[0] * 2  # lets go of a tensor of the new batch
    time.sleep(0.001)
    old = []  # long after the iterator has returned
    assert progress.trace[-1][2] == ended
    assert not old
    assert not batches._before


def test_after_anything_else_the_wait_is_over(progress: Progress) -> None:
    batches = SharedBatches(progress, LOADER)
    old = pair()
    fetched(progress, batches, old)
    new = pair()
    ended = fetched(progress, batches, new)
    progress.trace.append((FORWARD, now(), None, True, None))
    old = []
    assert [entry[2] for entry in progress.trace if entry[0] == DATA][-1] == ended
    assert not old


def test_another_thread_that_lets_go_changes_nothing(progress: Progress) -> None:
    batches = SharedBatches(progress, LOADER)
    old = [pair()]
    fetched(progress, batches, old[0])
    new = pair()
    ended = fetched(progress, batches, new)
    thread = threading.Thread(target=old.clear)
    thread.start()
    thread.join()
    assert progress.trace[-1][2] == ended
    assert not batches._before


def test_memory_is_held_as_long_as_the_loop_holds_it_and_no_longer(progress: Progress) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("torch_")

    batches = SharedBatches(progress, LOADER)
    gc.collect()
    before = mapped()
    batch = [torch.zeros(100_000).share_memory_(), torch.zeros(100_000).share_memory_()]
    fetched(progress, batches, batch)
    assert mapped() == before + 2
    kept = batch.pop()
    assert mapped() == before + 2
    batch.clear()
    assert mapped() == before + 1
    fetched(progress, batches, pair())
    fetched(progress, batches, pair())
    assert kept.sum() == 0, "two batches later it is still there for whoever kept it"
    del kept
    assert mapped() == before


def test_more_tensors_than_a_few_are_left_alone(progress: Progress) -> None:
    batches = SharedBatches(progress, LOADER)
    fetched(progress, batches, [torch.zeros(1) for _ in range(100)])
    assert len(batches._newest) <= 16


def test_a_loader_with_workers_is_watched_and_one_without_is_not(record) -> None:  # type: ignore[no-untyped-def]
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    data = TensorDataset(torch.randn(12, 4))
    watched = {}
    for workers in (0, 1):
        for (x,) in DataLoader(data, batch_size=2, num_workers=workers):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        watched[workers] = recorded.run._progress.shared
    del x
    assert watched[0] is None
    assert not watched[1]._newest, "the loop holds nothing any more"
