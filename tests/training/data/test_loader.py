"""Settings of a DataLoader by host, and loaders that go on in the middle of an epoch."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from torch.utils.data import TensorDataset

from perfagent_loop.data.loader import loader_defaults, resumable_loader, usable_cores

ROWS = [torch.tensor([number / 32, 1.0, -number / 64]) for number in range(32)]


def test_cores_are_those_that_this_process_may_use() -> None:
    before = os.sched_getaffinity(0)
    assert 1.0 <= usable_cores() <= len(before)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() == 1.0
        assert loader_defaults().arguments["num_workers"] == 1
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(64.0, 1, 8), (64.0, 8, 7), (64.0, 64, 1), (4.0, 1, 3), (1.5, 1, 1), (16.0, 4, 3)]
)
def test_ranks_share_the_cores(cores: float, ranks: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfagent_loop.data.loader.usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert loader_defaults(ROWS).arguments["num_workers"] == workers


def test_what_is_given_decides() -> None:
    in_memory = loader_defaults(TensorDataset(torch.ones(4)), device="cpu").arguments
    assert in_memory == {"num_workers": 0, "pin_memory": False}
    assert loader_defaults(device="cuda").arguments["pin_memory"] is True
    loader = resumable_loader(ROWS, batch_size=4, num_workers=0)
    assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (0, False, 4)
    assert resumable_loader(ROWS, num_workers=1).persistent_workers
    assert len([*itertools.islice(loader, 3)]) == 3


def test_batches_on_their_way_fit_into_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfagent_loop.data.loader.usable_cores", lambda: 16.0)
    told = os.statvfs("/dev/shm")
    free = told.f_bavail * told.f_frsize
    roomy = loader_defaults(batch_bytes=1).arguments
    assert (roomy["num_workers"], roomy["prefetch_factor"]) == (8, 2)
    tight = loader_defaults(batch_bytes=free // 16)
    assert tight.arguments["num_workers"] * tight.arguments["prefetch_factor"] <= 8
    huge = loader_defaults(batch_bytes=2 * free).arguments
    assert (huge["num_workers"], huge["prefetch_factor"]) == (1, 1)
