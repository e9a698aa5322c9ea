"""Which of several servers on one database does what: leases that a server renews while it lives.

Each shard of runs is judged and compacted by the server that holds its lease; two more leases are for sending what is
in the outbox and for retention. Shards are divided evenly among the servers that live. A lease that is not renewed
for TTL_S is anybody's. All times are those of the database, so servers need not agree on the time.

A server whose rules thread has ended or does not move gives its shards up, and counts no longer among the servers.

A server may stop for longer than that in the middle of its work, and go on without knowing. So every transaction that
writes what follows from a lease first verifies it (`verify`). Writers take turns (database/postgresql.py): until that
transaction has ended, nobody else can take the lease.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping

from sqlalchemy import Connection, delete, insert, select, update

from perfagent import __version__
from perfagent.errors import ResourceError
from perfagent_server.database import Database, StorageError
from perfagent_server.store.changes import database_clock, drop_old
from perfagent_server.store.shards import SHARDS, STORAGE, LeaseLost
from perfagent_server.store.statements import put
from perfagent_server.store.stored_json import stored_names
from perfagent_server.store.tables import lease, server

__all__ = ["OUTBOX", "TTL_S", "Leases"]

log = logging.getLogger("perfagent.server")

TTL_S = 10.0
EVERY_S = 2.0
"""Between two renewals."""
OUTBOX = "outbox"
_SINGLE = (OUTBOX, STORAGE)
_MARGIN_S = 2.0
"""A server stops to believe in a lease this long before the others do."""
_FORGOTTEN_S = 3600.0  # after that the row of a server that ended is deleted
_MOST_WATCHED = 1000  # names of what pages on a server show; with more it names all


class Leases:
    """start() and stop() the thread. secrets: must be equal on all servers; watching: the runs that pages on this server show
    (format: live/subscription.py). can_judge: whether the thread of the rules runs. held: the shards that this server
    holds (store/shards.py has the protocol). watched: what pages on other servers show."""

    def __init__(
        self,
        database: Database,
        address: str,
        secrets: str,
        watching: Callable[[], Collection[str]],
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._database, self._address, self._watching, self._monotonic = database, address, watching, monotonic
        self._mark = hashlib.sha256(b"perfagent:" + secrets.encode()).hexdigest()[:32]
        self._me = database.backend.replica
        self.can_judge: Callable[[], bool] = lambda: True
        self._could_judge = True  # when it was last asked
        self._terms: dict[str, int] = {}  # lease -> term
        self._until = -math.inf  # this server believes in them until then, monotonic
        self._cleaned = -math.inf
        self.watched: frozenset[str] = frozenset()
        self.counters: dict[str, float] = {"servers": 1, "leases": 0, "lost": 0}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> Mapping[str, int]:
        return {name: term for name, term in self._terms.items() if name in SHARDS} if self._is_sure else {}

    def term(self, name: str) -> int | None:
        """Of a lease that this server holds; None where it does not."""
        return self._terms.get(name) if self._is_sure else None

    def holds(self, name: str) -> bool:
        return self.term(name) is not None

    @property
    def _is_sure(self) -> bool:
        return self._monotonic() < self._until

    def verify(self, connection: Connection, terms: Mapping[str, int]) -> None:
        """Raises LeaseLost where this server has not held one of these leases since this term began."""
        if not terms:
            return
        mine = lease.c.name.in_(terms), lease.c.server == self._me, lease.c.expires > database_clock
        now = {row.name: row.term for row in connection.execute(select(lease.c.name, lease.c.term).where(*mine))}
        if now != dict(terms):
            # The next look may find them here again, in a new term.
            self._terms = {
                name: term for name, term in self._terms.items() if name not in terms or now.get(name) == term
            }
            self.counters["lost"] += 1
            raise LeaseLost("another server has taken over some of the runs; they are left to it")

    def check_secrets(self) -> None:
        """Raises ResourceError where another server has other secrets."""
        lives = server.c.seen > database_clock - TTL_S
        with self._database.read() as connection:
            others = connection.execute(select(server.c.address).where(lives, server.c.secrets != self._mark)).scalars()
            if address := next(iter(others), None):
                raise ResourceError(
                    f"the server at {address} has another admin token or key pepper: a key or a login would be valid on one of "
                    "the two only. Give all servers the same PERFAGENT_ADMIN_TOKEN and PERFAGENT_KEY_PEPPER, or the same files "
                    "admin-token and key-pepper in their data folders"
                )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Takes what is free at once, then renews it. Raises ResourceError as check_secrets() does: another server may have
        started at the same moment."""
        self._try_look()
        self.check_secrets()
        self._thread = threading.Thread(target=self._run, name="perfagent-leases", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Gives everything to the others."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self._terms = {}
        try:
            self._database.write(self._leave, essential=True)
        except StorageError as error:
            log.warning("the other servers wait %.0f s for the runs of this one: %s", TTL_S, error)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self._try_look()

    def _try_look(self) -> None:
        try:
            self.look()
        except StorageError as error:
            log.warning("the leases of this server could not be renewed: %s", error)
        except Exception:
            log.exception("the leases of this server could not be renewed")

    def look(self) -> None:
        """Renews what this server holds, takes what is free, and gives away what is more than its share."""
        begun = self._monotonic()
        self._note_judge()
        watching = self._watching()
        names = ["*"] if len(watching) > _MOST_WATCHED else sorted(watching)
        self._terms = self._database.write(lambda connection: self._renew(connection, names), essential=True)
        self._until = begun + TTL_S - _MARGIN_S
        self.counters["leases"] = len(self._terms)

    def _note_judge(self) -> None:
        could, self._could_judge = self._could_judge, self.can_judge()
        if could and not self._could_judge:
            log.error(
                "the thread of the rules has ended or does not move: the other servers judge the runs of this one; restart it"
            )
        elif self._could_judge and not could:
            log.warning("the thread of the rules moves again: this server takes its share of the runs")

    def _renew(self, connection: Connection, watching: list[str]) -> dict[str, int]:
        now = connection.execute(select(database_clock)).scalar_one()
        if self._could_judge:
            self._show(connection, float(now), watching)
        else:  # the others divide the shards among themselves
            connection.execute(delete(server).where(server.c.id == self._me))
        self._clean(connection, float(now))
        others = connection.execute(
            select(server.c.watching).where(server.c.id != self._me, server.c.seen > float(now) - TTL_S)
        ).scalars().all()  # fmt: skip
        self._note_watched(others)
        rows = {row.name: row for row in connection.execute(select(lease))}
        mine = {name for name, row in rows.items() if row.server == self._me and row.expires > float(now)}
        names = (*SHARDS, *_SINGLE)
        free = {name for name in names if name not in mine and (name not in rows or rows[name].expires <= float(now))}
        kept = _share(mine, free, servers=len(others) + 1) if self._could_judge else mine & set(_SINGLE)
        terms = {name: rows[name].term + (name not in mine) if name in rows else 1 for name in kept}
        for name in mine - kept:
            connection.execute(update(lease).where(lease.c.name == name).values(server="", expires=0.0))
        for name, term in terms.items():
            put(connection, lease, {"name": name, "server": self._me, "term": term, "expires": float(now) + TTL_S})
        return terms

    def _show(self, connection: Connection, now: float, watching: list[str]) -> None:
        values = {"seen": now, "watching": json.dumps(watching)}
        if not connection.execute(update(server).where(server.c.id == self._me).values(values)).rowcount:
            row = {
                "id": self._me,
                "address": self._address,
                "version": __version__,
                "started": now,
                "secrets": self._mark,
                **values,
            }
            connection.execute(insert(server).values(row))

    def _note_watched(self, others: Collection[str]) -> None:
        self.watched = frozenset(name for text in others for name in stored_names(text))
        self.counters["servers"] = len(others) + 1

    def _clean(self, connection: Connection, now: float) -> None:
        moment = self._monotonic()
        if moment - self._cleaned < _FORGOTTEN_S / 6:
            return
        self._cleaned = moment
        connection.execute(delete(server).where(server.c.seen < now - _FORGOTTEN_S))
        drop_old(connection)

    def _leave(self, connection: Connection) -> None:
        connection.execute(update(lease).where(lease.c.server == self._me).values(server="", expires=0.0))
        connection.execute(delete(server).where(server.c.id == self._me))


def _share(mine: set[str], free: set[str], *, servers: int) -> set[str]:
    """What a server holds from now on: what it has and what is free, but of the shards no more than its share."""
    most = math.ceil(len(SHARDS) / servers)
    shards = sorted(name for name in mine if name in SHARDS) + sorted(name for name in free if name in SHARDS)
    return {*shards[:most], *(name for name in mine | free if name not in SHARDS)}
