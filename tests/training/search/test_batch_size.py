"""The batch-size finder: the exact size, whole steps, and nothing left behind."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agent_recorded import Recording
from torch import nn
from torch.nn.modules import module as hooks_of_modules
from torch.optim import optimizer as hooks_of_optimizers

import perfagent
from perfagent.errors import ConfigError
from perfagent_loop.estimates.memory import estimate_memory
from perfagent_loop.search.batch_size import HostMemory, available_bytes, find_batch_size, search_batch_size


class Training:
    """Everything that a step can change: weights, running statistics, moments, a schedule, a scale, an average,
    generators."""

    def __init__(self, room: int) -> None:
        self.room, self.sizes = room, list[int]()
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=1)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)

    def step(self, size: int) -> None:
        self.sizes.append(size)
        self.model.train()
        # one more row than asked for: BatchNorm1d refuses a single one
        inputs = torch.randn(size + 1, 6) * random.random() * float(np.random.rand())
        loss = self.model(inputs).square().mean()
        self.scaler.scale(loss).backward()
        if size > self.room:  # in the middle of the step: gradients are there, the optimizer has not run
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.average.update_parameters(self.model)

    def state(self) -> str:
        parts: list[Any] = [self.model.state_dict(), self.average.state_dict(), self.model.training]
        parts += [[(id(p), p.grad) for p in self.model.parameters()], self.optimizer.state_dict()]
        parts += [self.schedule.state_dict(), self.scaler.state_dict(), torch.get_rng_state().tolist()]
        parts += [random.getstate(), np.random.get_state()]
        hooks = hooks_of_modules._global_forward_pre_hooks, hooks_of_optimizers._global_optimizer_pre_hooks
        return repr([*parts, *map(len, hooks)])


def test_the_size_is_exact_and_found_by_doubling_and_halving() -> None:
    with pytest.raises(ConfigError, match="perfagent estimate"):
        find_batch_size(Training(room=3).step, start=4)
    training = Training(room=37)
    found, trials = search_batch_size(training.step, 2, 4096)
    assert found == 37
    assert [trial.batch_size for trial in trials] == [2, 4, 8, 16, 32, 64, 48, 40, 36, 38, 37, 37]
    assert [trial.batch_size for trial in trials if not trial.fits] == [64, 48, 40, 38]
    assert training.sizes[:2] == [2, 2]  # the optimizer has no state before its first step
    assert training.sizes[-2:] == [37, 37]


@pytest.mark.parametrize(
    ("room", "start", "limit", "found"), [(1, 1, 64, 1), (2, 1, 64, 2), (99, 1, 64, 64), (99, 5, 5, 5), (99, 3, 50, 50)]
)
def test_the_answer_lies_between_start_and_limit(room: int, start: int, limit: int, found: int) -> None:
    assert find_batch_size(Training(room).step, start, limit) == found


@pytest.mark.parametrize("stepped_before", [False, True])
def test_everything_is_as_it_was(stepped_before: bool) -> None:
    training = Training(room=9)
    if stepped_before:
        training.step(4)
        (training.model(torch.ones(2, 6)).sum()).backward()  # a gradient that the user keeps
        training.model.eval()
    before = training.state()
    assert find_batch_size(training.step, limit=64) == 9
    assert training.state() == before

    def broken(size: int) -> None:
        training.step(size)
        if size == 4:
            raise ZeroDivisionError("a bug of the user's")

    with pytest.raises(ZeroDivisionError, match="a bug of the user's"):
        find_batch_size(broken)
    assert training.state() == before


def test_a_running_job_hears_nothing_of_searches_and_estimates(tmp_path: Path) -> None:
    training = Training(room=9)
    run = perfagent.attach(training.model, training.optimizer, record=tmp_path)
    find_batch_size(training.step, limit=16)
    training.step(4)
    before = training.state()
    estimate_memory(training.model, torch.ones(4, 6), optimizer=training.optimizer)
    assert training.state() == before
    for _ in range(2):
        training.step(4)
    run.finish()
    assert [step for step, _ in Recording(tmp_path).series("lr")] == [1, 2, 3]


def test_a_host_that_would_be_filled_is_not_tried() -> None:
    host, room = HostMemory(), available_bytes()
    assert room is not None
    host.begin()
    torch.ones(64 * 2**20, dtype=torch.uint8)
    host.end(4)  # 16 MiB a sample, seen though they are gone
    fits = room // (16 * 2**20)
    assert not host.would_not_hold(fits // 2, 0.9)
    assert host.would_not_hold(2 * fits, 0.9)
