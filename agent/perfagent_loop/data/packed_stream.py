"""A stream of packed rows, for datasets whose lengths nobody knows beforehand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from perfagent.errors import ConfigError
from perfagent_loop.collectives import rank_of_job, world_of_job
from perfagent_loop.data.collating import join
from perfagent_loop.data.packing import pack_stream
from perfagent_loop.kinds import Batch, Loader

__all__ = ["PackedStream"]


class PackedStream(IterableDataset[Batch]):
    """Packs the samples of a stream into rows: `DataLoader(PackedStream(samples, 8192), batch_size=None)`.

    Args:
        source: An IterableDataset, which divides itself among workers and ranks. Or a map-style dataset or another
            iterable that can be read again: each worker of each rank takes every n-th sample.
        capacity: Tokens of a row.
        length: Returns the tokens of a sample; see `pack_stream`.
        window: How many samples are packed together; see `pack_stream`.
        collate: Makes a batch of the samples of a row; `perfagent_loop.data.collating.join` by default.

    Raises:
        ConfigError: The source can be read only once.
    """

    def __init__(
        self,
        source: Loader,
        capacity: int,
        *,
        length: Callable[[Any], int] | None = None,
        window: int = 2000,
        collate: Callable[[list[Any]], Batch] = join,
    ) -> None:
        if isinstance(source, Iterator) or not (hasattr(source, "__iter__") or hasattr(source, "__getitem__")):
            raise ConfigError(f"source must be a dataset or list that can be read again, not {type(source).__name__}")
        self.source, self.capacity, self.length, self.window, self.collate = source, capacity, length, window, collate

    def __iter__(self) -> Iterator[Batch]:
        source: Loader = self.source
        samples: Iterable[object] = source
        if not isinstance(source, IterableDataset):
            part, parts = _share()
            if hasattr(source, "__getitem__") and hasattr(source, "__len__"):  # the others' samples are not even made
                samples = (source[index] for index in range(part, len(source), parts))
            else:
                samples = itertools.islice(iter(source), part, None, parts)
        return map(self.collate, pack_stream(samples, self.capacity, length=self.length, window=self.window))


def _share() -> tuple[int, int]:
    """Which share of the samples this process reads, and how many shares there are."""
    worker = get_worker_info()
    number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
    return rank_of_job() * workers + number, world_of_job() * workers
