"""Letting go of a batch is part of waiting for the next: measured on some batches, added to the wait of the others."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent.hooks.loops import sgd, step
from torch.utils.data import DataLoader

from perfagent.governor import Governor
from perfagent.hooks.batch_lifetime import Release
from perfagent.hooks.new_progress import new_progress
from perfagent.step.state import Progress, state
from perfagent.step.trace import DATA, entries_of

COST_NS = 5_000_000
READINGS_NS = 20_000
SIZE = 1 << 16


class Loop:
    """A loop over batches as the hooks see it; `at` is when the wait for the newest batch seemed to end."""

    def __init__(self, clock: Any, progress: Progress, release: Release | None = None, **iterator: Any) -> None:
        self.clock, self.progress, self.at = clock, progress, 0
        self.iterator = SimpleNamespace(**({"_num_workers": 1} | iterator))  # as torch names it
        self.release = progress.release = release or Release(progress)

    def fetch(self, batch: Any) -> Any:
        """As the hook in the iterator's `__next__` does."""
        self.release.settle()
        self.release.watch(self.iterator, batch, sys._getframe(1))
        began = self.at = self.clock.read_ns()
        self.progress.trace.clear()
        self.progress.trace.extend((began, began, id(self.iterator), (2, 0, False), DATA))
        return batch

    def lengthened_ns(self) -> int:
        """By how much the latest wait for data is longer than until the iterator returned."""
        waits = [entry[2] for entry in entries_of(self.progress.trace) if entry[0] == DATA]
        return waits[-1] - self.at

    def measured(self) -> Loop:
        """What a tensor of SIZE bytes costs is known."""
        for _ in range(3):
            self.release.costs.note(SIZE, COST_NS)
        return self

    def pause(self, seconds: float) -> Any:
        """What takes its time to go."""
        clock = self.clock

        class Pause:
            def __del__(self) -> None:
                clock.sleep(seconds)

        return Pause()


@pytest.fixture
def loop(clock: Any, monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = new_progress(deque(), Governor(0.5))
    monkeypatch.setattr(state, "current", made)
    return Loop(clock, made)


def tensor(size: int = SIZE) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def is_lengthened(loop: Loop, costs: int = 1) -> bool:
    return 0 < loop.lengthened_ns() - costs * COST_NS < READINGS_NS


def test_a_wait_lasts_until_the_last_tensor_is_given_back(loop: Loop) -> None:
    loop.measured()
    for number in range(3):
        x, y = loop.fetch((tensor(), tensor()))
        assert not number or is_lengthened(loop)
    batches = (loop.fetch({"inputs": [tensor(), [tensor()]], "names": ["a"]}) for _ in range(2))
    for _ in range(2):
        batch = next(batches)
    assert is_lengthened(loop)
    del x, y, batch


# ---- which are measured


@pytest.mark.real
@pytest.mark.parametrize(("workers", "batches"), [(0, 6), (1, 3)])
def test_nothing_is_held_when_the_run_is_over(record: Callable[..., Any], workers: int, batches: int) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = sgd(model)
    recorded = record(model)
    for number, x in enumerate(DataLoader(torch.randn(12, 4), batch_size=2, num_workers=workers), start=1):
        step(optimizer, model(x).square())
        if number == batches:
            break
    del x
    release = recorded.progress.release
    assert len(release.held) <= 1
    recorded.finish()
    assert recorded.progress.release is None
