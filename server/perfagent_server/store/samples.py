"""What the readers ask of compacted samples, wherever these lie: the seam behind the tail.

A frame is acknowledged in SQL and its samples stay in the tail until the compactor takes them to the sample store: blocks
in the same database (read/sql_samples.py), or ClickHouse (clickhouse/). A question reads tail and sample store under one
view: a snapshot shows exactly the samples whose tail rows are gone from the transaction that it belongs to, neither more
nor less, whatever the compactor does meanwhile.

Nothing here knows SQL. Whatever a store cannot answer now raises StorageError.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from perfagent_server.store.codec.aggregates import Cells
from perfagent_server.store.codec.blocks import Samples

__all__ = ["Newest", "Part", "SampleCompactor", "SampleSnapshot", "StoredSeries"]

Newest = tuple[int, int, float, float]
"""Attempt, step, time and value of a sample. No class: `latest` of 512 ranks makes a hundred thousand of them."""


class Part(NamedTuple):
    """Samples of one series. number: step // 1024 of all of them; load: the samples in the order of their steps, None where
    retention took them and only their cells are left."""

    number: int
    load: Callable[[], Samples | None]


class StoredSeries(Protocol):
    """What is compacted of one name of a run, over some of its ranks."""

    @property
    def ranks(self) -> Collection[int]:
        """Those that have sent the name, compacted or not."""

    @property
    def ends(self) -> Mapping[tuple[int, int], tuple[int, int]]:
        """(rank, attempt) -> first and last step of what cells() and parts() answer."""

    def loose(self) -> dict[tuple[int, int], Samples]:
        """(rank, attempt) -> samples that ends(), cells() and parts() leave out, in the order of their steps: the caller
        puts them together with those of the tail."""

    def cells(
        self, ranks: Collection[int], attempt: int, first: int, end: int, width: int
    ) -> Iterator[tuple[int, Cells]]:
        """(rank, cells) of the steps first..end, both inclusive, a rank once or several times. Every cell lies inside one
        span of `width` steps, a power of 2; count, non-finite count, minimum and maximum are exact. Where retention took
        the samples, a cell of 16 steps counts if it touches the steps."""

    def parts(self, attempt: int, first: int, end: int) -> Sequence[Part]:
        """The samples of the steps first..end and perhaps some around them, of all ranks; by number. Loading needs no
        snapshot any more."""

    def count(self, attempt: int, first: int, end: int) -> int:
        """At most so many samples of these steps are sure to be there: a quick way to see that there are too many."""


class SampleSnapshot(Protocol):
    """The compacted samples of one run, as they are at one moment."""

    def series(self, names: Sequence[str], rank: int | None) -> dict[str, StoredSeries]:
        """Of each name; rank: of that rank only."""

    def newest(self) -> Iterator[tuple[str, int, Newest | None]]:
        """(name, rank, newest sample) of every series, cut or not; None where nothing is compacted yet. A series may come
        several times: the newest counts."""

    def newest_up_to(self, rank: int, names: Collection[str], attempt: int, top: int) -> Iterator[tuple[str, Newest]]:
        """(name, newest sample of the attempt up to the step `top`) of these series of one rank."""


class SampleCompactor(Protocol):
    """Takes tail rows to the sample store, on a thread of its own. counters: for /self."""

    counters: dict[str, int]

    @property
    def is_behind(self) -> bool:
        """So much waits in the tail that senders have to wait."""

    @property
    def trouble(self) -> str:
        """Why samples stay in the tail now, in words; empty: they do not."""

    def start(self) -> None: ...
    def stop(self) -> None: ...

    def run_once(self, *, everything: bool = False) -> int:
        """Compacts what is due, or everything that may be. Answers the number of tail rows that are gone."""
