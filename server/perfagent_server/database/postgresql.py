"""PostgreSQL, by psycopg.

Readers are REPEATABLE READ, READ ONLY: all queries of one answer see one state of the data, as with SQLite.
Statements have timeouts, and a lost connection is an error that can be tried again.

The writer's connection holds an advisory lock, the server lock. When the connection is cut, the lock is gone, and the
writer must take it again before it writes. A server that is alone holds it for itself, so that no second one writes.

Replicas share the server lock, and take turns: each transaction of a writer begins by taking the write lock, which it
holds until its commit. So everything that is true for one writer is true for several: ids grow in the order of
commits, and what a job reads does not change under it. Each transaction also tells the others that there is something
new (NOTIFY).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator
from hashlib import sha256
from typing import Any

import psycopg
from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from perfagent.errors import ResourceError
from perfagent_server import schema
from perfagent_server.database.backend import REPLICA, Trouble
from perfagent_server.database.errors import Unreachable
from perfagent_server.database.migrating import upgrade
from perfagent_server.database.text_dumper import WithoutNul

__all__ = ["CHANNEL", "Postgresql", "open_postgresql"]

CHANNEL = "perfagent"
"""Of NOTIFY: a replica has written something; the payload is its id."""

_LEAST_VERSION = 14
_CONNECTIONS = 32  # of this server; PostgreSQL allows 100 unless it is told otherwise
_PATIENCE_S = 5
_LOCKS = 0x70657266  # "perf": the first number of our advisory locks
# The second: held while tables change, as long as a server runs, and by the replica whose turn it is to write.
_MIGRATION, _SERVER, _WRITE = 1, 2, 3
_TURN_IDLE_S = 10  # a replica that stops in the middle of its turn, such as a paused one, loses it after that
_NAME_IDLE_S = 20  # the same of alone_with(), in which a commit may be waited for
_ADMITTED_S = 10.0  # how long a replica that starts waits for one that upgrades the tables
_FREED_S = 3.0  # how long a server on its own waits for the lock of one that has just ended
_SETTINGS = {
    "statement_timeout": "60s",
    "lock_timeout": f"{_PATIENCE_S}s",
    "idle_in_transaction_session_timeout": "300s",
    "synchronous_commit": "on",  # an acknowledged sample must survive a crash
    "timezone": "UTC",
    # PostgreSQL frees our lock when it knows that we are gone.
    "tcp_keepalives_idle": "20",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
}
_CONNECT = {
    "connect_timeout": _PATIENCE_S, "application_name": "perfagent", "keepalives_idle": 20, "keepalives_interval": 5,
    "keepalives_count": 3, "tcp_user_timeout": 20_000,
}  # fmt: skip
_LOCK_TIMEOUT = "55P03"
_TROUBLES = {
    "53100": Trouble.FULL,
    "40001": Trouble.BUSY, "40P01": Trouble.BUSY, "55P03": Trouble.BUSY, "57014": Trouble.BUSY,
    "53300": Trouble.LOST, "57P01": Trouble.LOST, "57P02": Trouble.LOST, "57P03": Trouble.LOST, "57P05": Trouble.LOST,
    "25P03": Trouble.LOST, "25006": Trouble.LOST,  # the last: it is a standby now
}  # fmt: skip

_THIS_SESSION = text("SELECT pid, backend_start FROM pg_stat_activity WHERE pid = pg_backend_pid()")
_END_SESSION = text(
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :pid AND backend_start = :start"
)
_TAKE_LOCK = text("SELECT pg_try_advisory_lock(:kind, :what)")
_SHARE_LOCK = text("SELECT pg_try_advisory_lock_shared(:kind, :what)")
_END_HOLDER = text(
    "SELECT pg_terminate_backend(activity.pid) FROM pg_locks JOIN pg_stat_activity AS activity USING (pid) "
    "WHERE pg_locks.locktype = 'advisory' AND pg_locks.granted AND pg_locks.objsubid = 2 "
    "AND pg_locks.classid = :kind AND pg_locks.objid = :what AND activity.datname = current_database() "
    "AND activity.wait_event = 'ClientRead' AND activity.state_change < clock_timestamp() - make_interval(secs => :idle_s)"
)
_TAKE_TURN = text("SELECT pg_advisory_xact_lock(:kind, :what), pg_notify(:channel, :replica)")


class Postgresql:
    """The Backend of PostgreSQL, made by open_postgresql(). alone: the writer holds the server lock, so that no other server
    writes; replica: it shares it with other replicas."""

    def __init__(self, engine: Engine, *, alone: bool, replica: str = "") -> None:
        self.engine = engine
        self._alone = alone
        self.replica = replica
        self._first: Connection | None = None
        self.where = _place(engine.url)
        self._session: tuple[int, Any] | None = None  # process and start of the writer's newest session
        self._readers = engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)

    def read(self) -> Connection:
        return self._readers.connect()

    def writer(self) -> Connection:
        """Raises Unreachable where another server holds the lock."""
        connection, self._first = self._first or self._connected(), None
        try:
            if (self._alone or self.replica) and not self._take_lock(connection):
                raise Unreachable(_ALONE_IS_REFUSED if self._alone else _REPLICA_IS_REFUSED)
            if self.replica:
                connection.info[REPLICA] = self.replica
                with connection.begin():
                    connection.execute(text(f"SET idle_in_transaction_session_timeout = '{_TURN_IDLE_S}s'"))
        except BaseException:
            connection.close()
            raise
        return connection

    def _connected(self) -> Connection:
        """Whatever the database's default is: a job must see what the turn before it has written."""
        return self.engine.connect().execution_options(isolation_level="READ COMMITTED")

    def connect_writer(self) -> None:
        """Connects the writer now. Raises Unreachable as writer() does."""
        self._first = self.writer()

    def take_turn(self, connection: Connection) -> None:
        if not self.replica:
            return
        try:
            turn = {"kind": _LOCKS, "what": _WRITE, "channel": CHANNEL, "replica": self.replica}
            connection.execute(_TAKE_TURN, turn)
        except DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) == _LOCK_TIMEOUT:
                self._end_stopped_holder()
            raise

    def _end_stopped_holder(self) -> None:
        """Ends the session of a replica that has the turn and has stopped. PostgreSQL does so by itself in a transaction that
        idles, but not while it waits for the rest of a pipeline."""
        with contextlib.suppress(DBAPIError, PoolTimeout), self.engine.connect() as connection, connection.begin():
            connection.execute(_END_HOLDER, {"kind": _LOCKS, "what": _WRITE, "idle_s": _TURN_IDLE_S})

    @contextlib.contextmanager
    def alone_with(self, names: Collection[str]) -> Iterator[None]:
        if not self.replica:
            yield
            return
        # In order: two who want the same names must not each hold what the other one waits for.
        keys = sorted({int.from_bytes(sha256(name.encode()).digest()[:8], signed=True) for name in names})
        with self.engine.connect() as connection:
            transaction = connection.begin()
            connection.execute(text(f"SET LOCAL idle_in_transaction_session_timeout = '{_NAME_IDLE_S}s'"))
            for key in keys:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": key})
            try:
                yield
            finally:
                with contextlib.suppress(DBAPIError):  # a cut connection has freed the locks, and what was done is done
                    transaction.rollback()

    def _take_lock(self, connection: Connection) -> bool:
        """Takes the server lock; True if this connection has it. When our own connection was cut, PostgreSQL may not know
        that yet, and its session still holds the lock: then we end that session."""
        former = self._session
        with connection.begin():
            pid, start = connection.execute(_THIS_SESSION).one()
            if former not in (None, (pid, start)):
                connection.execute(_END_SESSION, {"pid": former[0], "start": former[1]})
            take = _SHARE_LOCK if self.replica else _TAKE_LOCK
            is_taken = bool(connection.execute(take, {"kind": _LOCKS, "what": _SERVER}).scalar_one())
        if is_taken:
            self._session = (pid, start)
        return is_taken

    def trouble(self, error: BaseException) -> Trouble | None:
        """Also of psycopg's own errors: hot statements go straight to the driver (store/statements.py)."""
        if isinstance(error, PoolTimeout):
            return Trouble.BUSY
        cause = error.orig if isinstance(error, DBAPIError) else error
        if not isinstance(cause, psycopg.Error):
            return None
        if cause.sqlstate is None and "number of parameters" in str(cause):
            return None  # a statement of ours that was never sent: to wait for the database mends nothing
        if cause.sqlstate is None or cause.sqlstate.startswith("08"):
            return Trouble.LOST if isinstance(cause, (psycopg.OperationalError, psycopg.InterfaceError)) else None
        return _TROUBLES.get(cause.sqlstate)

    def has_room(self) -> bool:
        return True  # nobody here can know: the next write tries

    def use_reserve(self) -> None:
        pass

    def close(self) -> None:
        if self._first is not None:
            self._first.close()
        self.engine.dispose()

    @property
    def size_bytes(self) -> int:
        with contextlib.suppress(DBAPIError, PoolTimeout), self.read() as connection:
            return int(connection.execute(text("SELECT pg_database_size(current_database())")).scalar_one())
        return 0


def open_postgresql(
    url: URL, *, alone: bool = False, replica: str = "", migrate: bool = True, patience_s: float = _FREED_S
) -> Postgresql:
    """Creates or upgrades the tables, unless migrate is False. alone: as the database's one server; replica: as one of
    several, under this id; neither: beside servers, whose tables stay as they are. Raises ResourceError for a database that
    cannot be used."""
    opened = Postgresql(_engine(url), alone=alone, replica=replica)
    try:
        _check(opened.engine, opened.where)
        if alone:
            _connect_writer(opened, patience_s=min(_FREED_S, patience_s))
        if replica:
            _join(opened)
        elif alone:
            _upgrade(opened)
        elif migrate:
            _upgrade_unless_used(opened)
    except Unreachable as error:
        opened.close()
        raise ResourceError(str(error)) from error
    except BaseException:
        opened.close()
        raise
    return opened


def _upgrade(opened: Postgresql) -> None:
    cure = "restore it from a backup, or name an empty database"
    upgrade(opened.engine, opened.where, cure=cure, first=_wait_for_turn)


def _upgrade_if_unused(opened: Postgresql) -> None:
    """Tables are upgraded only while no server runs: an older one might not understand them."""
    lock = {"kind": _LOCKS, "what": _SERVER}
    with opened.engine.connect() as connection:
        with connection.begin():
            is_first = connection.execute(_TAKE_LOCK, lock).scalar_one()
        try:
            if is_first:
                _upgrade(opened)
        finally:
            connection.invalidate()  # ends the session, and with it the lock


def _upgrade_unless_used(opened: Postgresql) -> None:
    """For commands, which may run beside servers. Raises ResourceError where servers of another version run."""
    until = time.monotonic() + _ADMITTED_S  # another command may just upgrade the tables
    while _revision(opened) != schema.head():
        if time.monotonic() > until:
            raise ResourceError(
                f"the database {opened.where} has tables of another version of perfagent, whose servers run: name one of them "
                "with --server, or stop them all, then run `perfagent db upgrade`"
            )
        _upgrade_if_unused(opened)
        time.sleep(0.2)


def _revision(opened: Postgresql) -> str | None:
    with opened.engine.connect() as connection, connection.begin():
        return schema.current(connection)


def _join(opened: Postgresql) -> None:
    """Becomes one of the replicas."""
    _upgrade_if_unused(opened)
    _connect_writer(opened, patience_s=_ADMITTED_S)
    if _revision(opened) != schema.head():
        raise ResourceError(
            f"the database {opened.where} has tables of another version of perfagent, whose servers run: stop them all, then "
            "start this one, which upgrades the tables"
        )


def _connect_writer(opened: Postgresql, *, patience_s: float) -> None:
    """Raises Unreachable where another server still holds the lock then."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return opened.connect_writer()
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


_ALONE_IS_REFUSED = "another server uses the database; stop one of the two, or start both with --replica"
_REPLICA_IS_REFUSED = (
    "a server without --replica uses the database, or upgrades its tables; stop it, or start it with --replica, too"
)


def _engine(url: URL) -> Engine:
    """An engine; nothing is connected yet."""
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        pool_size=8,
        max_overflow=_CONNECTIONS - 8,
        pool_timeout=_PATIENCE_S,
        pool_pre_ping=True,  # connections that were cut while they lay there are replaced, and nobody notices
        pool_use_lifo=True,
        connect_args=_CONNECT,
    )
    settings = "; ".join(f"SET {name} = '{value}'" for name, value in _SETTINGS.items())

    @event.listens_for(engine, "connect")
    def configure(connection: psycopg.Connection, _record: object) -> None:
        connection.adapters.register_dumper(str, WithoutNul)
        connection.execute(settings)  # not at the start of the connection: poolers refuse that
        connection.commit()

    return engine


def _place(url: URL) -> str:
    """Without user, password and options, which are nobody else's business."""
    return f"postgresql://{url.host or url.query.get('host', 'localhost')}/{url.database}"


def _check(engine: Engine, where: str) -> None:
    try:
        with engine.connect() as connection:
            version = int(connection.execute(text("SHOW server_version_num")).scalar_one()) // 10_000
            encoding = connection.execute(text("SHOW server_encoding")).scalar_one()
    except DBAPIError as error:
        reason = str(error.orig).strip().replace("\n", "; ")
        raise ResourceError(
            f"the database {where} cannot be reached ({reason}): check its address, user and password"
        ) from error
    if version < _LEAST_VERSION:
        raise ResourceError(
            f"the database {where} is PostgreSQL {version}; {_LEAST_VERSION} is the oldest that is supported"
        )
    if encoding != "UTF8":
        raise ResourceError(f"the database {where} has the encoding {encoding}; make one with ENCODING 'UTF8'")


def _wait_for_turn(connection: Connection) -> None:
    """Others that migrate, too, wait for us and then find nothing to do."""
    connection.execute(text("SET LOCAL lock_timeout = 0"))
    connection.execute(text("SET LOCAL statement_timeout = 0"))
    connection.execute(text("SELECT pg_advisory_xact_lock(:kind, :what)"), {"kind": _LOCKS, "what": _MIGRATION})
