"""Letting go of a batch is part of waiting for the next: measured on some batches, added to the wait of the others."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from perfagent.governor import Governor
from perfagent.hooks import batch_lifetime as subject
from perfagent.hooks.batch_lifetime import Release
from perfagent.hooks.new_progress import new_progress
from perfagent.step.state import Progress, now, state
from perfagent.step.trace import DATA, FORWARD, entries_of

WORKER = SimpleNamespace(_num_workers=1)
COST_NS = 5_000_000
SIZE = 1 << 20


class Loop:
    """A loop over batches as the hooks see it; `at` is when the wait for the newest batch seemed to end."""

    def __init__(self, p: Progress, iterator: Any = WORKER) -> None:
        self.progress, self.iterator, self.at = p, iterator, 0
        self.release = p.release = Release(p)

    def fetch(self, batch: Any) -> Any:
        """As the hook in the iterator's `__next__` does."""
        self.release.settle()
        self.release.watch(self.iterator, batch, sys._getframe(1))
        began = self.at = now()
        self.progress.trace.extend((began, began, id(self.iterator), (2, 0, False), DATA))
        return batch

    def lengthened_ns(self) -> int:
        """By how much the latest wait for data is longer than until the iterator returned."""
        waits = [entry[2] for entry in entries_of(self.progress.trace) if entry[0] == DATA]
        return waits[-1] - self.at

    def measured(self) -> None:
        """What a tensor of SIZE bytes costs is known."""
        for _ in range(3):
            self.release._costs.note(SIZE, COST_NS)

    @property
    def loader(self) -> Any:
        return self.release._loaders[id(self.iterator)]


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = new_progress(deque(), Governor(0.5))
    monkeypatch.setattr(state, "current", made)
    return Loop(made)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may do something else between two lines of a test."""
    monkeypatch.setattr(subject, "_AT_ONCE_NS", 10**10)


def tensor(size: int = SIZE) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("torch_")


@pytest.mark.usefixtures("patient")
def test_the_wait_lasts_until_the_last_tensor_is_given_back(loop: Loop) -> None:
    loop.measured()
    for number in range(3):
        x, y = loop.fetch((tensor(), tensor()))
        if number:
            assert 0 < loop.lengthened_ns() - COST_NS < now() - loop.at
            assert loop.progress.trace[-3:] == [id(WORKER), (2, 0, False), DATA]
    del x, y


@pytest.mark.usefixtures("patient")
def test_tensors_are_found_in_nested_batches(loop: Loop) -> None:
    loop.measured()
    for _ in range(2):
        batch = loop.fetch({"inputs": [tensor(), tensor()], "labels": tensor(), "names": ["a", "b"]})
        assert len(loop.loader.newest) == 3
    assert loop.lengthened_ns() >= COST_NS
    assert not loop.loader.before
    del batch


@pytest.mark.usefixtures("patient")
def test_a_call_of_next_counts_like_the_head_of_a_loop(loop: Loop) -> None:
    loop.measured()
    batches = (loop.fetch([tensor()]) for _ in range(2))
    for _ in range(2):
        batch = next(batches)
    assert loop.lengthened_ns() >= COST_NS
    del batch


@pytest.mark.usefixtures("patient")
def test_a_line_further_down_is_the_loops_own_time(loop: Loop) -> None:
    loop.measured()
    for _ in range(3):
        batch = loop.fetch([tensor()])
        x = batch[0]  # here the tensor of the batch before goes
    assert loop.lengthened_ns() == 0
    assert not loop.release.held
    del x


def test_what_the_loop_does_with_the_new_batch_is_its_own_time(loop: Loop) -> None:
    loop.measured()
    for _ in range(2):
        batch = loop.fetch([tensor()])
        batch[0] = batch[0] * 2
    assert loop.lengthened_ns() == 0


def test_long_after_the_iterator_has_returned_it_is_the_loops_own_time(loop: Loop) -> None:
    def slowly(batch: Any) -> Any:
        time.sleep(0.001)
        return batch

    loop.measured()
    for _ in range(2):
        batch = slowly(loop.fetch([tensor()]))
    assert loop.lengthened_ns() == 0
    del batch


@pytest.mark.usefixtures("patient")
def test_after_anything_else_the_wait_is_over(loop: Loop) -> None:
    def evaluated(batch: Any) -> Any:
        loop.progress.trace.extend((now(), None, True, None, FORWARD))
        return batch

    loop.measured()
    for _ in range(2):
        batch = evaluated(loop.fetch([tensor()]))
    assert loop.lengthened_ns() == 0
    del batch


@pytest.mark.usefixtures("patient")
def test_another_thread_that_lets_go_changes_nothing(loop: Loop) -> None:
    loop.measured()
    old = [loop.fetch([tensor()])]
    loop.fetch([tensor()])
    thread = threading.Thread(target=old.clear)
    thread.start()
    thread.join()
    assert loop.lengthened_ns() == 0
    assert not loop.loader.before


@pytest.mark.usefixtures("patient")
def test_the_first_batches_are_measured_while_the_next_is_waited_for(loop: Loop) -> None:
    gc.collect()
    before = mapped()
    for number in range(1, 7):
        x = loop.fetch(tensor().share_memory_())
        measured = number in (2, 3, 4)
        assert len(loop.release.held) == measured
        assert mapped() == before + 1 + measured
        assert (loop.lengthened_ns() > 0) == (number > 4)
    del x
    costs = loop.release._costs
    assert costs.ns(SIZE) > 0
    (latest,) = costs._latest.values()
    assert len(latest) == 3


@pytest.mark.usefixtures("patient")
def test_what_was_measured_holds_for_the_iterators_of_later_epochs(loop: Loop) -> None:
    held = 0
    for _ in range(20):
        loop.iterator = SimpleNamespace(_num_workers=1)
        for _ in range(3):
            x = loop.fetch(tensor().share_memory_())
            held += len(loop.release.held)
    del x
    assert held <= 3 + 40 // 32
    assert len(loop.release._loaders) <= 4


@pytest.mark.usefixtures("patient")
def test_two_loaders_in_one_loop(loop: Loop) -> None:
    loop.measured()
    other = Loop(loop.progress, SimpleNamespace(_num_workers=2))
    other.release = loop.release
    loop.progress.release = loop.release
    for number in range(3):
        x, y = loop.fetch(tensor()), other.fetch(tensor())
        if number:
            waits = [entry for entry in entries_of(loop.progress.trace) if entry[0] == DATA]
            assert waits[-1][2] - other.at >= COST_NS
    del x, y


def test_a_second_large_tensor_counts_although_the_first_took_its_time(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image and its mask: how long the first takes is known to some percent only, and that is more than a moment."""
    loop.measured()
    first, second = [tensor()], [tensor()]
    loop.fetch((first[0], second[0]))

    monkeypatch.setattr(Release, "_fetches", lambda *_: True)
    new = loop.fetch((tensor(), tensor()))
    clock = [loop.at]
    monkeypatch.setattr(subject, "now", lambda: clock[0])
    first.clear()
    clock[0] += 3 * COST_NS // 2  # half as long again as expected
    second.clear()
    assert loop.lengthened_ns() == 5 * COST_NS // 2
    del new


@pytest.mark.usefixtures("patient")
def test_what_is_held_goes_when_no_batch_is_asked_for_any_more(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        x = loop.fetch(tensor().share_memory_())
    assert len(loop.release.held) == 1
    loop.release.expire()
    assert len(loop.release.held) == 1, "it may be asked for in a moment"
    monkeypatch.setattr(subject, "_MOST_HELD_NS", 0)
    before = mapped()
    loop.release.expire()
    assert loop.release.held == []
    assert mapped() == before - 1
    del x


@pytest.mark.usefixtures("patient")
def test_of_later_batches_few_are_measured(loop: Loop) -> None:
    loop.measured()
    held = 0
    for _ in range(321):
        x = loop.fetch(tensor().share_memory_())
        held += len(loop.release.held)
    assert held == 10
    del x


@pytest.mark.usefixtures("patient")
def test_a_batch_is_held_only_where_the_next_ones_fit_beside_it(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=3 * SIZE // 4096, f_frsize=4096))
    before = mapped()
    for _ in range(4):
        x = loop.fetch(tensor().share_memory_())
        assert mapped() == before + 1
    del x


@pytest.mark.usefixtures("patient")
def test_what_is_too_large_is_not_held(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_MOST_HELD_BYTES", SIZE * 3 // 2)
    loop.iterator = SimpleNamespace(_num_workers=0)
    for _ in range(3):
        x, y = loop.fetch((tensor(), tensor()))
    assert len(loop.release.held) == 1, "one fits, two do not"
    del x, y


@pytest.mark.usefixtures("patient")
def test_a_tensor_that_is_kept_stays_as_it_is(loop: Loop) -> None:
    kept = []
    for number in range(8):
        x = loop.fetch(torch.full((1000,), float(number)).share_memory_())
        if number % 2:
            kept.append(x[::2])
    del x
    assert [tensor.unique().tolist() for tensor in kept] == [[1.0], [3.0], [5.0], [7.0]]


@pytest.mark.usefixtures("patient")
def test_a_loader_whose_batches_cost_nothing_is_looked_at_once_in_a_thousand(loop: Loop) -> None:
    data = [torch.zeros(100, 4)]
    for number in range(6):
        x = loop.fetch(data[0][number : number + 2])  # a view: to let go of it gives no memory back
    assert loop.loader.rest > 990
    assert not loop.loader.newest
    assert not loop.loader.before
    other = Loop(loop.progress, SimpleNamespace(_num_workers=1))
    other.release = loop.progress.release = loop.release
    batch = other.fetch([tensor()])
    assert len(other.loader.newest) == len(batch), "another loader's batches may cost something"
    for _ in range(loop.loader.rest):
        x = loop.fetch(x)
    loop.fetch(x)
    assert loop.loader.newest, "it may have changed"


def test_pinned_batches_are_left_alone(loop: Loop) -> None:
    loop.iterator = SimpleNamespace(_num_workers=2, _pin_memory=True)
    loop.fetch([tensor()])
    assert loop.loader.rest
    assert not loop.loader.newest


def test_more_tensors_than_a_few_are_left_alone(loop: Loop) -> None:
    loop.fetch([torch.zeros(1) for _ in range(100)])
    assert len(loop.loader.newest) <= 16


def test_the_cost_of_a_size_is_that_of_about_as_many_pages() -> None:
    costs = subject._Costs()
    for ns in (10, 12, 500_000):
        costs.note(1 << 20, ns)
    assert costs.ns(1 << 20) == 12, "the median: one outlier says nothing"
    assert costs.ns((1 << 20) + (1 << 16)) == 12
    assert costs.ns(5 << 18) == 0
    assert costs.ns(1 << 12) == 0
    for _ in range(5):
        costs.note(1 << 20, 40)
    assert costs.ns(1 << 20) == 40, "the latest count"


@pytest.mark.parametrize("pages", [0, 1, 7, 15, 16, 17, 31, 32, 100, 4095, 4096, 1 << 20])
def test_sizes_that_count_as_the_same_are_within_an_eighth(pages: int) -> None:
    same = [
        other for other in range(max(pages - pages // 4, 0), pages + pages // 4 + 2) if about(other) == about(pages)
    ]
    assert same[-1] - same[0] <= pages / 8
    assert about(max(same) + 1) > about(pages)


def about(pages: int) -> int:
    return subject._about(pages * 4096)


def test_tensors_on_a_device_are_left_alone(loop: Loop) -> None:
    loop.fetch([torch.zeros(4, device="meta"), torch.zeros(4).to_sparse()])
    assert not loop.loader.newest


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("batches", [2, 3, 6])
def test_nothing_is_held_when_the_run_is_over(record: Callable[..., Any], workers: int, batches: int) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    data = TensorDataset(torch.randn(12, 4))
    for number, (x,) in enumerate(DataLoader(data, batch_size=2, num_workers=workers), start=1):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == batches:
            break
    del x
    progress = recorded.run._progress
    assert len(progress.release.held) <= 1
    recorded.finish()
    assert progress.release is None
