"""Slows down who guesses passwords: per address, and per user name. In the database, so that all servers count together.

A login is counted before its password is compared, and the count is taken back when it was right. Each wrong one beyond
the first few doubles the wait, up to a minute: nobody is locked out for good. While a wait lasts nothing is compared, and
nothing is counted. Who has logged in from a browser before has a count of its own there, and that one only (people.py), so
that a stranger who guesses at the name, or behind the same address, does not keep its owner out.
"""

from __future__ import annotations

import hashlib
import ipaddress
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, select

from perfagent_server.database import Database
from perfagent_server.store.statements import put
from perfagent_server.store.tables import login_failure

__all__ = ["Bucket", "LoginLimits", "of_address", "of_device", "of_name"]

_LONGEST_S = 60.0
_FORGOTTEN_S = 900.0  # without a failure


@dataclass(frozen=True, slots=True)
class Bucket:
    """What failures are counted by. free: so many without a wait; is_cleared: by a right password, all of them."""

    key: str
    free: int
    is_cleared: bool


def of_address(address: str) -> Bucket:
    """Of IPv6 the network: a home has 2**64 addresses."""
    try:
        known = ipaddress.ip_address(address)
        where = str(ipaddress.ip_network((known, 64), strict=False)) if known.version == 6 else address
    except ValueError:
        where = address
    # One's own right password must not make room for guesses at another's.
    return Bucket(_key("address", where), free=10, is_cleared=False)


def of_name(folded: str) -> Bucket:
    return Bucket(_key("name", folded), free=5, is_cleared=True)


def of_device(device: str) -> Bucket:
    """Of a browser in which this name has logged in before."""
    return Bucket(_key("device", device), free=5, is_cleared=True)


def _key(kind: str, what: str) -> str:
    return hashlib.sha256(f"{kind} {what}".encode("utf-8", "replace")).hexdigest()


class LoginLimits:
    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        self._database, self._clock = database, clock
        self._swept = -math.inf

    def begin(self, buckets: Sequence[Bucket]) -> float:
        """Counts a login that is about to be compared; seconds to wait where it may not be, else 0. Writes the
        database only where it may be: a stranger who goes on all the same costs no writes."""
        now = self._clock()
        with self._database.read() as connection:
            wait = _wait(self._known(connection, buckets, now, locked=False), now)
        if wait > 0:
            return wait
        is_due = now - self._swept > _FORGOTTEN_S
        if is_due:
            self._swept = now

        def job(connection: Connection) -> float:
            if is_due:
                connection.execute(delete(login_failure).where(login_failure.c.last < now - _FORGOTTEN_S))
            known = self._known(connection, buckets, now)
            if (wait := _wait(known, now)) > 0:
                return wait
            for bucket in buckets:
                failures = (known[bucket.key].failures if bucket.key in known else 0) + 1
                _write(connection, bucket, failures, now)
            return 0.0

        return self._database.write(job, essential=True)  # a full disk keeps nobody out

    def succeeded(self, buckets: Sequence[Bucket]) -> None:
        """It was right: it is not counted. Writes the database."""

        def job(connection: Connection) -> None:
            known = self._known(connection, buckets, -math.inf)
            for bucket in buckets:
                if bucket.key not in known:
                    continue
                if bucket.is_cleared or known[bucket.key].failures <= 1:
                    connection.execute(delete(login_failure).where(login_failure.c.bucket == bucket.key))
                else:
                    _write(connection, bucket, known[bucket.key].failures - 1, known[bucket.key].last, waits=False)

        self._database.write(job, essential=True)

    @staticmethod
    def _known(connection: Connection, buckets: Sequence[Bucket], now: float, *, locked: bool = True) -> dict[str, Any]:
        """The counts that are not forgotten yet. locked: for a transaction that writes; servers on one database then count
        after one another."""
        its = login_failure.c.bucket.in_([bucket.key for bucket in buckets])
        query = select(login_failure).where(its, login_failure.c.last >= now - _FORGOTTEN_S)
        rows = connection.execute(query.with_for_update() if locked else query)
        return {row.bucket: row for row in rows}


def _wait(known: Mapping[str, Any], now: float) -> float:
    """A clock that was set back must not make a minute a day."""
    return max((min(row.blocked_until - now, _LONGEST_S) for row in known.values()), default=0.0)


def _write(connection: Connection, bucket: Bucket, failures: int, now: float, *, waits: bool = True) -> None:
    beyond = failures - bucket.free
    wait = min(2.0 ** min(beyond + 1, 10), _LONGEST_S) if beyond >= 0 and waits else 0.0
    values = {"bucket": bucket.key, "failures": failures, "last": now, "blocked_until": now + wait if wait else 0.0}
    put(connection, login_failure, values)
