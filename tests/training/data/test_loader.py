"""Settings of a DataLoader by host, and loaders that go on in the middle of an epoch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from perfagent.samplers.cgroup import find
from perfagent_loop.data.loader import loader_defaults, resumable_loader, usable_cores


class Rows(Dataset[Tensor]):
    """Rows that depend on their number alone."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / 32, 1.0, -index / 64])


def test_cores_are_those_that_this_process_may_use() -> None:
    allowed = len(os.sched_getaffinity(0))
    group = find()
    assert 1.0 <= usable_cores() <= allowed
    if group is not None and group.cores is not None:
        assert usable_cores() == max(1.0, min(allowed, group.cores))
    one = {min(os.sched_getaffinity(0))}
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, one)
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
    settings = loader_defaults(Rows())
    assert settings.arguments["num_workers"] == workers
    assert f"{cores:g} cores may be used here" in str(settings)


def test_tensors_in_memory_need_no_workers() -> None:
    assert loader_defaults(TensorDataset(torch.ones(4)), device="cpu").arguments == {
        "num_workers": 0,
        "pin_memory": False,
    }
    assert loader_defaults(device="cuda").arguments["pin_memory"] is True


def test_batches_on_their_way_fit_into_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfagent_loop.data.loader.usable_cores", lambda: 16.0)
    told = os.statvfs("/dev/shm")
    free = told.f_bavail * told.f_frsize
    roomy = loader_defaults(batch_bytes=1).arguments
    assert (roomy["num_workers"], roomy["prefetch_factor"]) == (8, 2)
    tight = loader_defaults(batch_bytes=free // 16)
    assert tight.arguments["num_workers"] * tight.arguments["prefetch_factor"] <= 8
    assert "docker run --shm-size" in str(tight)
    huge = loader_defaults(batch_bytes=2 * free).arguments
    assert (huge["num_workers"], huge["prefetch_factor"]) == (1, 1)


def test_a_stream_is_told_to_share_itself_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfagent_loop.data.loader.usable_cores", lambda: 16.0)
    assert "must share itself among workers" in str(loader_defaults(Stream()))
    assert "must share itself" not in str(loader_defaults(Rows()))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(3)])


def test_what_is_given_wins_over_the_settings() -> None:
    loader = resumable_loader(Rows(), batch_size=4, num_workers=0)
    assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (0, False, 4)
    assert resumable_loader(Rows(), num_workers=1).persistent_workers
    assert len([*itertools.islice(loader, 3)]) == 3
