"""Runs divide into shards: the unit in which servers on one database share the work behind the acknowledgement.

The shard of a run is the first hexadecimal digit of the MD5 of its id, which PostgreSQL computes as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from sqlalchemy import Connection

from perfagent_server.database import StorageError

__all__ = ["EVERY", "SHARDS", "STORAGE", "AllShards", "LeaseLost", "Shards", "StoreLeases", "shard_of"]

SHARDS = "0123456789abcdef"
EVERY = frozenset(SHARDS)
STORAGE = "storage"
"""The lease of the one server that deletes by age and takes samples to ClickHouse, for all shards."""


@lru_cache(65_536)
def shard_of(run: str) -> str:
    return hashlib.md5(run.encode("utf-8", "replace"), usedforsecurity=False).hexdigest()[0]


class LeaseLost(StorageError):  # noqa: N818 - a state, as those of the database
    """Another server does this by now; what was to be written is left to it."""

    retry_after_s = 1.0


class Shards(Protocol):
    """The shards whose runs this server judges and compacts."""

    @property
    def held(self) -> Mapping[str, int]:
        """At this moment: shard -> its term. A shard that went to another server and came back has a new term: what is in memory
        of its runs is old."""

    def verify(self, connection: Connection, terms: Mapping[str, int]) -> None:
        """Called in the transactions that write what follows from holding shards in these terms. Raises LeaseLost where one
        of them belongs to another server by now, or did meanwhile."""


class StoreLeases(Shards, Protocol):
    """What a store asks of the leases of a server that shares its database. verify() also takes STORAGE."""

    def term(self, name: str) -> int | None:
        """Of a lease that this server holds at this moment; None where it does not."""


class AllShards:
    """Of a server that is alone with its database."""

    held: Mapping[str, int] = dict.fromkeys(SHARDS, 0)

    def term(self, _name: str) -> int | None:
        return 0

    def verify(self, connection: Connection, terms: Mapping[str, int]) -> None:
        pass
