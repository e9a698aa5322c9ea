"""Loader workers: batches whose samples wait for storage, loaded by 0 to 8 workers and from a cache.

The storage is a wait of fixed length for each sample, as a disk or a network would make it; the device is a wait as
well, since the host does nothing while a GPU computes. So workers beyond the cores count, too; what workers gain when
samples cost processor time is in the last rows.

What 8 workers gain over 2 is measured over whole epochs of a training that runs already, nothing left out: the plain
loader with 2 workers beside one with 8 and the rest of `loader_defaults`, whose workers stay from epoch to epoch.
Between two batches the gain cannot be above that in workers, 4; that figure, and that of the first epoch, which starts
the workers, are given next to it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perfagent_loop.data.loader import loader_defaults
from perfagent_tools.bench.machine import described
from perfagent_tools.bench.report import Figure, Report, percent, times

__all__ = ["Computing", "Epochs", "Waiting", "epochs_of", "measure", "taken"]

SAMPLE_S, BATCH, STEP_S = 0.010, 16, 0.048
"""A sample's wait; samples a batch; the device's part of a step, with which 2 workers keep it busy for 60 % of the
time."""
FEW, MANY = 2, 8


class Waiting(Dataset[Tensor]):
    """Samples that come after `wait_s`, as from storage; `cached` ones have been read before."""

    def __init__(self, samples: int, wait_s: float, *, cached: bool = False) -> None:
        self.values = torch.arange(samples, dtype=torch.float32)
        self.wait_s = 0.0 if cached else wait_s

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Tensor:
        if self.wait_s:
            time.sleep(self.wait_s)
        return self.values[index]


class Computing(Dataset[Tensor]):
    """Samples that cost about `cpu_s` of a processor."""

    def __init__(self, samples: int, cpu_s: float) -> None:
        self.samples, self.cpu_s = samples, cpu_s

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        until = time.thread_time() + self.cpu_s
        value = index
        while time.thread_time() < until:
            value = (value * 1103515245 + 12345) % 2**31
        return torch.tensor(float(value))


def taken(batches: Iterable[object], step_s: float = 0.0) -> tuple[float, float]:
    """Seconds a batch after the first one, and the share (0..1) of that time in which the device computes for
    `step_s`."""
    iterator: Iterator[object] = iter(batches)
    next(iterator)
    count, began = 0, time.perf_counter()
    if step_s:
        time.sleep(step_s)
    for _ in iterator:
        count += 1
        if step_s:
            time.sleep(step_s)
    elapsed = time.perf_counter() - began
    return elapsed / count, min(1.0, step_s * (count + 1) / elapsed)


@dataclass(frozen=True, slots=True)
class Epochs:
    """Of one loader, by when its batches came: seconds from the beginning of the epoch, one list an epoch. ahead:
    batches that come together at the beginning, one of each worker."""

    came: list[list[float]]
    ahead: int

    @property
    def first_s(self) -> float:
        """The first epoch, with the start of the workers."""
        return self.came[0][-1]

    @property
    def later_s(self) -> float:
        """An epoch of a training that runs: all of it, from asking for the loader's iterator to the last batch."""
        return statistics.median(epoch[-1] for epoch in self.came[1:])

    @property
    def between_s(self) -> float:
        """From one batch to the next, when the workers run."""
        return statistics.median((epoch[-1] - epoch[self.ahead - 1]) / (len(epoch) - self.ahead) for epoch in self.came)


def epochs_of(*loaders: DataLoader[Tensor], rounds: int) -> list[Epochs]:
    """So many epochs of each loader, in turns."""
    came: list[list[list[float]]] = [[] for _ in loaders]
    for _ in range(rounds):
        for loader, found in zip(loaders, came, strict=True):
            began = time.perf_counter()
            found.append([time.perf_counter() - began for _ in loader])
    return [Epochs(found, max(1, loader.num_workers)) for loader, found in zip(loaders, came, strict=True)]


def _few_and_many(scale: float, batches: int, *, quick: bool) -> tuple[Epochs, Epochs]:
    """The plain loader with few workers, and one with many and our other settings."""
    data = Waiting(BATCH * batches, scale * SAMPLE_S)
    settings = {**loader_defaults(data).arguments, "num_workers": MANY, "pin_memory": False}
    few: DataLoader[Tensor] = DataLoader(data, batch_size=BATCH, num_workers=FEW)
    many: DataLoader[Tensor] = DataLoader(data, batch_size=BATCH, **settings)
    first, second = epochs_of(few, many, rounds=2 if quick else 4)
    return first, second


def _loaded(scale: float, batches: int, *, quick: bool) -> dict[str, tuple[float, float | None]]:
    """By loader: seconds a batch, and the share (0..1) of the time in which the device is busy."""
    found: dict[str, tuple[float, float | None]] = {}

    def loader(data: Dataset[Tensor], workers: int) -> DataLoader[Tensor]:
        return DataLoader(data, batch_size=BATCH, num_workers=workers)

    for workers in (0, 1, FEW, 4, MANY):
        waiting = Waiting(BATCH * (batches if workers >= FEW else max(9, batches // 4)), scale * SAMPLE_S)
        alone, _ = taken(loader(waiting, workers))
        _, busy = taken(loader(waiting, workers), scale * STEP_S)
        found[f"{workers} workers"] = (alone, busy)
    cached = Waiting(BATCH * batches, SAMPLE_S, cached=True)
    found["cached, 0 workers"] = (taken(loader(cached, 0))[0], taken(loader(cached, 0), scale * STEP_S)[1])
    for workers in (FEW, MANY):
        computing = Computing(BATCH * (9 if quick else 33), 0.1 * SAMPLE_S)
        found[f"{workers} workers, samples that compute"] = (taken(loader(computing, workers))[0], None)
    return found


def measure(device: torch.device, *, quick: bool = False) -> Report:
    scale = 0.1 if quick else 1.0
    batches = 16 if quick else 64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they only wait
        few, many = _few_and_many(scale, batches, quick=quick)
        found = _loaded(scale, batches, quick=quick)
    speed, between = few.later_s / many.later_s, few.between_s / many.between_s
    busy_few, busy_many = (100 * (found[f"{workers} workers"][1] or 0.0) for workers in (FEW, MANY))
    from_cache = found[f"{MANY} workers"][0] / found["cached, 0 workers"][0]
    computed = found[f"{FEW} workers, samples that compute"][0] / found[f"{MANY} workers, samples that compute"][0]
    return Report(
        name="workers",
        device=device.type,
        machine=described(device),
        setup=f"{BATCH} samples a batch, {1000 * scale * SAMPLE_S:.0f} ms of waiting for storage each; device busy for "
        f"{1000 * scale * STEP_S:.0f} ms a step; {batches} batches",
        figures={
            "speed": Figure(
                speed,
                f"an epoch of a running training is loaded {times(speed)} as fast by {MANY} workers that stay as by the plain "
                f"loader's {FEW}; between two batches it is {times(between)}",
                f"Helps while samples wait for storage or network. Between two batches {MANY // FEW} times as many workers can "
                f"be at most {MANY // FEW} times as fast. An epoch gains more where "
                "persistent_workers=True saves the start of the workers, and less where its number of batches is not a multiple "
                f"of {MANY}. The first epoch, which starts them, is {times(few.first_s / many.first_s)} as fast. Samples that "
                "cost processor time gain "
                f"{times(computed)} "
                "here: no more than there are cores.",
            ),
            "utilization": Figure(
                busy_many,
                f"the device is busy {percent(busy_many)} of the time with {MANY} workers, {percent(busy_few)} with {FEW}",
                "Helps until the workers together load a batch faster than the device needs for one; more of them only take "
                "memory.",
            ),
            "cached": Figure(
                from_cache,
                f"from memory a batch comes {times(from_cache)} as fast as from {MANY} workers",
                "The gain is what reading and decoding cost; the cache must fit into memory, and random augmentation must come "
                "after it.",
            ),
        },
        beside={
            "few_epoch_s": few.later_s,
            "many_epoch_s": many.later_s,
            "between_batches": between,
            "first_epoch": few.first_s / many.first_s,
        },
        head=["loader", "ms a batch", "device busy %"],
        rows=[
            [f"{name}, epochs after the first", f"{1000 * each:.2f}", "-"]
            for name, each in (
                (f"{FEW} workers, plain", few.later_s / batches),
                (f"{MANY} workers that stay", many.later_s / batches),
            )
        ]
        + [
            [name, f"{1000 * alone:.2f}", "-" if busy is None else f"{100 * busy:.0f}"]
            for name, (alone, busy) in found.items()
        ],
    )
