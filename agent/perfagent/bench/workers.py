"""Loader workers: batches whose samples wait for storage, loaded by 0 to 8 workers and from a cache.

The storage is a wait of fixed length for each sample, as a disk or a network would make it; the device is a wait as well,
since the host does nothing while a GPU computes. Both are the guide's own setting and let workers beyond the cores count; what
workers gain when samples cost processor time is in the last rows.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from perfagent.bench.machine import described
from perfagent.bench.report import Figure, Report, percent, times

__all__ = ["Computing", "Waiting", "measure", "taken"]

SAMPLE_S, BATCH, STEP_S = 0.010, 16, 0.048
"""A sample's wait; samples a batch; the device's part of a step, with which 2 workers keep it busy for 60 % of the time."""
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
    """Seconds a batch after the first one, and the share (0..1) of that time in which the device computes for `step_s`."""
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
    batches = 8 if quick else 64
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")  # more workers than cores: they only wait
        found = _loaded(scale, batches, quick=quick)
    speed = found[f"{FEW} workers"][0] / found[f"{MANY} workers"][0]
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
                f"{MANY} workers load a batch {times(speed)} as fast as {FEW}",
                "Holds while samples wait for storage or network: then the gain is that in workers (4), and a little more in "
                "short epochs, whose first batches come from all of them at once. Samples that cost processor time gain "
                f"{times(computed)} here: no more than there are cores.",
            ),
            "utilization": Figure(
                busy_many,
                f"the device is busy {percent(busy_many)} of the time with {MANY} workers, {percent(busy_few)} with {FEW}",
                "Holds when the workers together load a batch faster than the device needs for one; beyond that more of them "
                "only take memory.",
            ),
            "cached": Figure(
                from_cache,
                f"from memory a batch comes {times(from_cache)} as fast as from {MANY} workers",
                "The gain is what reading and decoding cost; the cache must fit into memory, and random augmentation must come "
                "after it.",
            ),
        },
        head=["loader", "ms a batch", "device busy %"],
        rows=[
            [name, f"{1000 * alone:.2f}", "-" if busy is None else f"{100 * busy:.0f}"] for name, (alone, busy) in found.items()
        ],
    )
