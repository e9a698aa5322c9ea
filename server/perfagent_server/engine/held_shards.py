"""The shards whose runs this server judges: in which term it holds each, and up to which frame it has judged them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from sqlalchemy import Connection

from perfagent_server.store.shards import Shards, shard_of

__all__ = ["HeldShards"]

_MOST_KEPT = 100_000
"""So many rows of the tail are kept for late runs."""


class HeldShards:
    """terms: held shard -> the term in which what is in memory of its runs is valid; seen: -> the tail id up to which they
    were judged in memory; late: runs that are behind their shard -> the tail id up to which each was judged."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.terms: Mapping[str, int] = {}
        self.seen: dict[str, int] = {}
        self.late: dict[str, int] = {}

    def __contains__(self, run: str) -> bool:
        return shard_of(run) in self.seen

    @property
    def present(self) -> Mapping[str, int]:
        """As it is now: shards may have come or gone."""
        return self._shards.held

    def lost(self) -> set[str]:
        """Those that went to another server."""
        held = self.present
        return {shard for shard, term in self.terms.items() if held.get(shard) != term}

    def upto(self, run: str | None = None) -> int:
        """The tail id up to which a run was judged; without a run the lowest of all shards."""
        return min(self.seen.values(), default=0) if run is None else self.seen.get(shard_of(run), 0)

    def cursors(self) -> dict[str, int]:
        """Shard -> the tail id up to which all of its runs were judged: the tail keeps what lies beyond."""
        cursors = dict(self.seen)
        for run, upto in self.late.items():
            seen = self.upto(run)
            cursors[shard_of(run)] = min(cursors[shard_of(run)], max(upto, seen - _MOST_KEPT))
        return cursors

    def forget(self) -> None:
        self.terms, self.seen, self.late = {}, {}, {}

    def verify(self, connection: Connection, shards: Collection[str]) -> None:
        """Raises LeaseLost where one of them belongs to another server by now."""
        self._shards.verify(connection, {shard: self.terms.get(shard, -1) for shard in shards})

    def verified(
        self, runs: Iterable[str], also: Callable[[Connection], object] | None = None
    ) -> Callable[[Connection], object]:
        """A job that does `also` if this server still holds the shards of these runs."""
        shards = {shard_of(run) for run in runs}

        def job(connection: Connection) -> None:
            self.verify(connection, shards)
            if also is not None:
                also(connection)

        return job
