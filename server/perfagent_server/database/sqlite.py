"""SQLite in one file: WAL, synchronous=FULL, so a commit survives a power cut.

A full disk: SQLite cannot even delete rows then, so the data folder holds a file of zeros whose name says what it is
for (RESERVE). It is removed when a write fails for lack of space, and created again as soon as there is room.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator
from pathlib import Path

import re2
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import DBAPIError, OperationalError

from perfagent.errors import ResourceError
from perfagent_server.database.backend import PATIENCE_S, Trouble
from perfagent_server.database.migrating import upgrade

__all__ = ["LOG_BYTES", "RESERVE", "RESERVE_BYTES", "Sqlite", "open_sqlite", "sqlite_engine"]

RESERVE = "reserve-for-a-full-disk"
RESERVE_BYTES = 64 * 2**20
"""Room for the log of what is written while the disk is full: deletions and alerts."""
_WRITER_CACHE_KIB, _READERS_CACHE_KIB = 16_384, 4096
# The size of the log before a checkpoint (wal_autocheckpoint, 1000 pages) and the largest commit beyond it. Tried and
# not taken: checkpoints after 4000 pages, or a log of 16 MB (7 % less written, no less CPU); pages of 8 or 16 kB (11 to
# 25 % more room); checkpoints on a thread of their own (p99 of an acknowledgement 8 to 12 ms instead of 16 with a
# single name, the mean the same).
LOG_BYTES = 4_500_000
CHECK_UP_TO_BYTES = 256 * 2**20  # a full quick_check of this much takes about a second; a start must not take minutes


class Sqlite:
    """The Backend of SQLite. Made by open_sqlite(); reserve: the file of zeros, None without one."""

    replica = ""

    def __init__(self, engine: Engine, *, reserve: Path | None = None, reserve_bytes: int = RESERVE_BYTES) -> None:
        self.engine = engine
        self.where = engine.url.database or ""
        self._reserve, self._reserve_bytes = reserve, reserve_bytes
        self.has_room()

    def read(self) -> Connection:
        return self.engine.connect()

    def writer(self) -> Connection:
        connection = self.engine.connect().execution_options(perfagent_write=True)
        connection.connection.cursor().execute(f"PRAGMA cache_size=-{_WRITER_CACHE_KIB}")
        return connection

    def take_turn(self, connection: Connection) -> None:
        """Nobody else writes."""

    def alone_with(self, _names: Collection[str]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def trouble(self, error: BaseException) -> Trouble | None:
        cause = error.orig if isinstance(error, DBAPIError) else error
        # extended codes keep the primary one in the low byte
        code = (getattr(cause, "sqlite_errorcode", 0) or 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return Trouble.FULL
        return Trouble.BUSY if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED) else None

    def close(self) -> None:
        self.engine.dispose()

    @property
    def size_bytes(self) -> int:
        """Of the file, with its write-ahead log."""
        file = self.where
        return sum(Path(name).stat().st_size for name in (file, f"{file}-wal") if name and Path(name).is_file())

    def has_room(self) -> bool:
        """Creates the reserve if there is room for it and some more. True when writes may go on."""
        if self._reserve is None:
            return True
        try:
            if self._reserve.exists() and self._reserve.stat().st_size >= self._reserve_bytes:
                return True
            if shutil.disk_usage(self._reserve.parent).free < self._reserve_bytes * 5 // 4:
                return False
            with _private_file(self._reserve, os.O_TRUNC) as descriptor:
                os.posix_fallocate(descriptor, 0, self._reserve_bytes)
        except OSError:
            self._reserve.unlink(missing_ok=True)
            return False
        return True

    def use_reserve(self) -> None:
        if self._reserve is not None:
            self._reserve.unlink(missing_ok=True)


def open_sqlite(path: Path, *, reserve_bytes: int = RESERVE_BYTES, patience_s: float = PATIENCE_S) -> Sqlite:
    """Opens, creates or upgrades the file. Raises ResourceError, with the file and the cure, if it must not be used."""
    _prepare(path)
    engine = sqlite_engine(path, patience_s)
    try:
        _refuse_damage(path, patience_s)
        upgrade(engine, str(path), cure="restore it with `perfagent db restore`, or move it away to start empty")
        _grow_log(engine, path)
    except BaseException:
        engine.dispose()
        raise
    return Sqlite(engine, reserve=path.parent / RESERVE, reserve_bytes=reserve_bytes)


def _matches(pattern: str, text: str | None) -> bool:
    """In time that grows with the text alone, whatever the pattern: Python's re may take hours for twenty characters."""
    return text is not None and re2.search(pattern, text) is not None


def sqlite_engine(path: Path, patience_s: float = PATIENCE_S) -> Engine:
    """An engine whose transactions really are SQLite's: reads BEGIN, the writer BEGIN IMMEDIATE. patience_s: how long a
    statement waits for another program's lock."""
    options = {"check_same_thread": False, "timeout": patience_s}
    engine = create_engine(
        f"sqlite:///{path}",
        pool_size=8,
        max_overflow=56,
        pool_use_lifo=True,  # the newest connection has the warmest cache, and idle ones hold no second copy of it
        connect_args=options,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
        connection.create_function("REGEXP", 2, _matches, deterministic=True)  # SQLAlchemy's own is Python's re
        # Whoever reads a text that is not UTF-8 must not fail for it: many rows are read in one statement.
        connection.text_factory = lambda text: text.decode("utf-8", "replace")
        connection.isolation_level = None  # the driver's own BEGIN would come too late for DDL and too weak for writing
        if connection.execute("PRAGMA page_count").fetchone() == (0,):
            # Before the first table, else without effect; and then only, because setting it writes and wants the lock.
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",
            "foreign_keys=ON",
            # Each connection has a cache of its own, and the file's pages are in the system's, too: 64 MB, or a mapped
            # file, made nothing faster, and a server of a thousand runs larger.
            f"cache_size=-{_READERS_CACHE_KIB}",
            "temp_store=MEMORY",
            # Debian's SQLite fills all that is deleted with zeros, so each frame that is compacted would be written
            # once more. FAST does so only where it costs no writing.
            "secure_delete=FAST",
        ):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        statement = "BEGIN IMMEDIATE" if connection.get_execution_options().get("perfagent_write") else "BEGIN"
        cursor = connection.connection.cursor()
        try:
            # by the driver: SQLAlchemy's way to it takes 50 µs, and every read and commit comes here
            cursor.execute(statement)
        except sqlite3.OperationalError as error:
            raise OperationalError(statement, None, error) from error
        finally:
            cursor.close()

    return engine


def _prepare(path: Path) -> None:
    """The folder 0700 and the file 0600: what a run was started with is nobody else's business."""
    folder = path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _private_file(path):
            pass
    except OSError as error:
        raise ResourceError(
            f"the data folder {folder} cannot be written ({error.strerror}): make it writable for this user, or choose another "
            "with --data"
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK) or not os.access(path, os.W_OK):
        raise ResourceError(
            f"the database {path} cannot be written: make it and its folder writable for this user, or choose another with --data"
        )


@contextlib.contextmanager
def _private_file(path: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o600)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _refuse_damage(path: Path, patience_s: float) -> None:
    """Never start on half the data. Files too large for a quick start are checked by their schema only."""
    cure = "restore it with `perfagent db restore`, or move the file away to start empty"
    try:
        connection = sqlite3.connect(path, timeout=patience_s)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if path.stat().st_size <= CHECK_UP_TO_BYTES:
                verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if verdict != "ok":
                    raise ResourceError(f"the database {path} is damaged ({verdict}): {cure}")
        finally:
            connection.close()
    except sqlite3.OperationalError as error:
        cure = "stop other programs that use it and try again"
        raise ResourceError(f"the database {path} cannot be opened ({error}): {cure}") from error
    except sqlite3.DatabaseError as error:
        raise ResourceError(f"the database {path} is damaged or no database at all ({error}): {cure}") from error


def _grow_log(engine: Engine, path: Path) -> None:
    """Gives the write-ahead log the size that it has before a checkpoint, so that no commit, the first ones included,
    writes into a file that grows: an fsync of such a file waits for the file system's journal as well.

    Without it the first thousand pages of commits take a fifth longer. A transaction that is rolled back does it: what
    does not fit into a small cache is spilled into the log, which keeps its size. (Writing a row and dropping it would
    grow the database itself by 4.5 MB.) It is only about speed: a full disk or somebody else's lock is left to the
    writes.
    """
    log = path.with_name(f"{path.name}-wal")
    with contextlib.suppress(sqlite3.OperationalError, OSError), engine.connect() as connection:
        driver = connection.connection.driver_connection
        assert driver is not None
        if log.stat().st_size < LOG_BYTES:
            with _other_pragmas(driver, cache_size=8, busy_timeout=0):
                try:
                    driver.execute("BEGIN IMMEDIATE")
                    driver.execute("CREATE TABLE perfagent_log_growth (filling BLOB)")
                    driver.execute("INSERT INTO perfagent_log_growth VALUES (zeroblob(?))", (LOG_BYTES,))
                finally:
                    driver.rollback()
            with _private_file(log) as descriptor:
                os.fsync(descriptor)  # now, and not in the first commit that somebody waits for


@contextlib.contextmanager
def _other_pragmas(driver: sqlite3.Connection, **pragmas: int) -> Iterator[None]:
    """Other settings of a connection for a while."""
    before = {name: driver.execute(f"PRAGMA {name}").fetchone()[0] for name in pragmas}
    try:
        for name, value in pragmas.items():
            driver.execute(f"PRAGMA {name}={value}")
        yield
    finally:
        for name, value in before.items():
            driver.execute(f"PRAGMA {name}={value}")
