"""Settings of a DataLoader by host, and loaders that go on in the middle of an epoch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from case_selection import everyday
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import perfagent
from perfagent.errors import ConfigError
from perfagent.samplers.cgroup import find
from perfagent.training.data.loader import loader_defaults, resumable_loader, usable_cores
from perfagent.training.data.packed_stream import PackedStream


class Rows(Dataset[Tensor]):
    """Rows that depend on their number alone."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / 32, 1.0, -index / 64])


# ---- settings


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
    monkeypatch.setattr("perfagent.training.data.loader.usable_cores", lambda: cores)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    settings = loader_defaults(Rows())
    assert settings.arguments["num_workers"] == workers
    assert f"{cores:g} cores may be used here" in str(settings)


def test_tensors_in_memory_need_no_workers() -> None:
    settings = loader_defaults(TensorDataset(torch.ones(4)))
    assert settings.arguments == {"num_workers": 0, "pin_memory": torch.cuda.is_available()}


def test_memory_is_pinned_for_a_gpu_only() -> None:
    assert loader_defaults(device="cuda").arguments["pin_memory"] is True
    assert loader_defaults(device="cpu").arguments["pin_memory"] is False


def test_batches_on_their_way_fit_into_the_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfagent.training.data.loader.usable_cores", lambda: 16.0)
    told = os.statvfs("/dev/shm")
    free = told.f_bavail * told.f_frsize
    roomy = loader_defaults(batch_bytes=1).arguments
    assert (roomy["num_workers"], roomy["prefetch_factor"]) == (8, 2)
    tight = loader_defaults(batch_bytes=free // 16)
    assert tight.arguments["num_workers"] * tight.arguments["prefetch_factor"] <= 8
    assert "docker run --shm-size" in str(tight)
    huge = loader_defaults(batch_bytes=2 * free).arguments
    assert (huge["num_workers"], huge["prefetch_factor"]) == (1, 1)


def test_the_settings_make_a_loader() -> None:
    for dataset in (Rows(), TensorDataset(torch.ones(8, 3))):
        loader = DataLoader(dataset, batch_size=4, **loader_defaults(dataset).arguments)
        assert len([*loader]) == len(dataset) // 4


@pytest.mark.parametrize("ranks", [0, "2"])
def test_a_wrong_number_of_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(
        ConfigError, match="ranks_on_node is the number of training processes on this machine, 1 or more"
    ):
        loader_defaults(ranks_on_node=ranks)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "gpu"}, "as torch names it"),
        ({"batch_bytes": 0}, "size of one batch"),
        ({"batch_bytes": "64M"}, "size of one"),
    ],
)
def test_wrong_settings_are_refused_in_words(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        loader_defaults(**options)


def test_a_stream_is_told_to_share_itself_among_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfagent.training.data.loader.usable_cores", lambda: 16.0)
    assert "must share itself among workers" in str(loader_defaults(Stream()))
    assert "must share itself" not in str(loader_defaults(Rows()))


# ---- loaders that go on


class Stream(IterableDataset[Tensor]):
    """Drawn from a generator of its own; every worker has its share. It can say where it is, or not."""

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        generator = torch.Generator().manual_seed(first)
        for number in range(first, 24, step):
            yield torch.cat([torch.tensor([number / 24]), torch.rand(2, generator=generator)])


class Placed(IterableDataset[Tensor]):
    """As Stream, with a state: what was given is not read again."""

    def __init__(self) -> None:
        self.read = self.begin = 0
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[Tensor]:
        begin, self.begin = self.begin, 0
        if not begin:
            self.generator.manual_seed(0)
        for number in range(begin, 24):
            row = torch.cat([torch.tensor([number / 24]), torch.rand(2, generator=self.generator)])
            self.read = number + 1
            yield row

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin = state["read"]
        self.read = state["read"]
        self.generator.set_state(state["generator"])


def row_of(samples: list[Tensor]) -> Tensor:
    return torch.cat(samples)[None, :3]


def row_loop(folder: Path | None = None) -> perfagent.Loop:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    checkpoint = None if folder is None else perfagent.Checkpoint(folder, every=1, keep=3, emergency=False)
    return perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1), checkpoint=checkpoint)


def losses_of(loop: perfagent.Loop, loader: DataLoader[Any], steps: int | None = None) -> list[float]:
    losses = []
    for batch in loop.batches(loader, epochs=2, steps=steps):
        with loop.forward():
            loss = loop.model(batch).square().mean()
        loop.backward(loss)
        loop.step()
        losses.append(loss.item())
    return losses


LOADERS: dict[str, Any] = {
    "map-style": lambda workers: resumable_loader(Rows(), batch_size=4, shuffle=True, num_workers=workers),
    "stream": lambda workers: resumable_loader(Stream(), batch_size=4, num_workers=workers),
    "packed stream": lambda workers: resumable_loader(
        PackedStream(Rows(), 9, window=8, collate=row_of), batch_size=None, num_workers=workers
    ),
    "stream with a state": lambda workers: resumable_loader(Placed(), batch_size=4, num_workers=workers),
}


@pytest.mark.parametrize(
    ("kind", "workers"), everyday(5, [*((kind, 0) for kind in LOADERS), *((kind, 2) for kind in LOADERS)])
)
def test_a_checkpoint_goes_on_after_the_last_batch_that_was_trained_on(
    kind: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perfagent.session._resumed", None)  # no run of a later test is to go on here
    make = LOADERS[kind]
    if kind == "stream with a state" and workers:
        workers = 1  # it does not share its rows among workers
    whole = losses_of(row_loop(), make(workers))
    epoch = len(whole) // 2
    for stop in (epoch, epoch + 2) if workers else (3, epoch, epoch + 2):
        folder = tmp_path / str(stop)
        first = row_loop(folder)
        begun = losses_of(first, make(workers), steps=stop)
        first.checkpoint.wait()
        second = row_loop(folder)
        second.resume()
        assert second.step_count == stop
        assert begun + losses_of(second, make(workers)) == whole


def test_another_number_of_workers_is_refused_in_a_sentence(tmp_path: Path) -> None:
    first = row_loop()
    losses_of(first, LOADERS["map-style"](0), steps=3)
    state = first.state_dict()
    second = row_loop()
    second.load_state_dict(state)
    with pytest.raises(
        ConfigError, match="torchdata wants the num_workers that it was saved with, and this loader has 1"
    ):
        losses_of(second, LOADERS["map-style"](1))


def test_what_is_given_wins_over_the_settings() -> None:
    loader = resumable_loader(Rows(), batch_size=4, num_workers=0)
    assert (loader.num_workers, loader.persistent_workers, loader.batch_size) == (0, False, 4)
    assert resumable_loader(Rows(), num_workers=1).persistent_workers
    assert len([*itertools.islice(loader, 3)]) == 3
