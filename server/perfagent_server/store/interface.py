"""What a metric store promises to the rest of the server, and the shapes of its answers that are not on the wire.

Several stores can stand behind it (blocks in the database, or ClickHouse); ingest, routes, rules and exports know only this file.
Every method is safe from any thread. What a store is made of, and in which transactions it writes, is its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from perfagent.wire import Frame, Latest, LogRow, RankMatrix, Series
from perfagent_server.event_data import Rejected
from perfagent_server.store.shards import EVERY
from perfagent_server.store.stored import FromTail

__all__ = ["Batch", "Check", "MetricStore", "Receipt", "Refused", "no_check"]

Check = Callable[[Any], None]
"""A function that the store calls at the start of a transaction, with its connection. If it raises, the transaction changes
nothing."""


def no_check(_connection: object) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a whole frame was not stored. code: "forbidden" (its key may not send there) or "source_in_use" (never will
    it be); message: for its sender; field: of the frame."""

    code: str
    message: str
    field: str


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one frame. stored, duplicate: samples. A frame that was here before has all its samples in
    `duplicate`. tail_id: the row behind the ack, None for a duplicate and for a frame that was refused; again: it is a
    duplicate."""

    stored: int
    duplicate: int
    rejected: list[Rejected] = field(default_factory=list)
    tail_id: int | None = None
    refused: Refused | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """Frames that are stored together. now: server clock, Unix seconds. limited: positions of frames whose key may send to
    their own project only."""

    frames: Sequence[Frame]
    now: float
    limited: Collection[int] = ()


class MetricStore(Protocol):
    def append(self, take: Callable[[], Batch]) -> Future[list[Receipt]]:
        """Stores frames, each (source, seq) once and all of its samples or none; one receipt a frame, in their order. Frames
        may be late and in any order. An attempt that begins at a step hides what older ones have from there on.

        take: called when the store comes to it, so that all frames that have come by then are stored together; called
        again, for the same frames, when the store has to try again. The future resolves when the frames survive a crash; it
        fails with StorageError when they could not be stored. Raises QueueFull if too much waits already."""

    def latest(self, run: str) -> dict[str, Latest]:
        """The newest visible sample of each name, ranks put together as the catalogue says."""

    def newest_of_runs(self, wanted: Any, name: str) -> dict[str, float]:
        """Run -> its newest value of a name, as latest() has it, of those runs that have one; `loss`: of what each run
        calls its loss. wanted: a query of ids of runs."""

    def series(
        self,
        run: str,
        name: str,
        *,
        rank: int | Literal["all"] = "all",
        from_step: int | None = None,
        to_step: int | None = None,
        points: int = 1000,
    ) -> Series:
        """At most `points` buckets over the steps from..to, both inclusive."""

    def newest(self, run: str, names: Sequence[str], *, steps: int | None, points: int = 20_000) -> dict[str, Series]:
        """The newest `steps` steps of the first of these names (None: all), and the same steps of the others, as
        series() gives them in at most `points` buckets, in one pass. Left out: what has no samples there, and what is
        put together from other series."""

    def ranks(
        self, run: str, name: str, *, from_step: int | None = None, to_step: int | None = None, points: int = 200
    ) -> RankMatrix:
        """One row of bucket means for each rank, all over the same buckets."""

    def names(self, run: str) -> list[str]:
        """Every name that this run has sent, sorted."""

    def since(
        self,
        tail_id: int,
        limit: int,
        max_bytes: int | None = None,
        *,
        run: str | None = None,
        shards: frozenset[str] = EVERY,
    ) -> list[FromTail]:
        """Accepted frames after `tail_id`, oldest first: at most `limit`, and after the first no more than `max_bytes`
        as stored. run: only its frames; shards: only those of runs in these shards. Frames stay readable here until the
        rules' cursor of their shard has passed them."""

    def until(self, tail_id: int, limit: int, max_bytes: int, *, run: str) -> list[FromTail]:
        """A run's newest accepted frames up to `tail_id`, oldest first: at most `limit`, and beside the newest no more
        than `max_bytes` as stored. Those that were compacted are gone from here."""

    def newest_id(self) -> int:
        """The id of the newest accepted frame; 0 if there is none."""

    def samples(self, run: str, names: Collection[str] | None = None) -> Iterator[LogRow]:
        """Every visible sample exactly once, or those of some names: by name, then rank, then step."""

    def delete(self, run: str, check: Check = no_check) -> None:
        """Removes a run with all that belongs to it. Others write meanwhile; until it is gone, the run is there with less and
        less in it. Also on a full disk. check: called first in each transaction; what it raises ends the deletion, and the
        run stays with what is left of it."""
