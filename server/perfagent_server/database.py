"""The one database: a pool for reading, and one thread that owns every write.

Writes are jobs. The writer takes all jobs that wait, runs each in its own savepoint inside one transaction, commits
once (SQLite: WAL, synchronous=FULL, so a commit survives a power cut) and only then resolves their futures. One fsync
is thus shared by everyone who waited, and no two parts of the server ever fight for SQLite's write lock.

A full disk: SQLite cannot even delete rows then, so the data folder holds a file of zeros whose name says what it is
for (RESERVE). The writer removes it when a write fails for lack of space, refuses further writes with StorageFull
except the `essential` ones (deletions, alerts), and creates it again, and accepts again, as soon as there is room.
Reading goes on all the while.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DatabaseError, DBAPIError, OperationalError

from perfagent.errors import ConfigError, PerfagentError, ResourceError
from perfagent_server import schema

log = logging.getLogger("perfagent.server")

__all__ = ["Database", "DatabaseSettings", "QueueFull", "StorageError", "StorageFull", "open_database"]

T = TypeVar("T")

RESERVE = "reserve-for-a-full-disk"
RESERVE_BYTES = 64 * 2**20
"""Room for the log of what is written while the disk is full: deletions and alerts."""
_FORMER_RESERVE = "ballast"
MAX_WAITING = 20_000  # jobs; far above what a healthy writer ever leaves waiting
MAX_BATCH = 256  # jobs in one commit: bounds how long the first of them waits for the last
LOCK_PATIENCE_S = 5.0  # how long a write waits for another program's lock before its caller is asked to come back
_WRITER_CACHE_KIB, _READERS_CACHE_KIB = 16_384, 4096
_ADDRESS = "sqlite:////path/perfagent.db"
# The size of the log before a checkpoint (wal_autocheckpoint, 1000 pages) and the largest commit beyond it. Tried and
# not taken: checkpoints after 4000 pages, or a log of 16 MB (7 % less written, no less CPU); pages of 8 or 16 kB (11 to
# 25 % more room); checkpoints on a thread of their own (p99 of an acknowledgement 8 to 12 ms instead of 16 with a
# single name, the mean the same).
LOG_BYTES = 4_500_000
CHECK_UP_TO_BYTES = 256 * 2**20  # a full quick_check of this much takes about a second; a start must not take minutes


class StorageError(PerfagentError):
    """A write could not be done now and can be tried again. retry_after_s: when."""

    retry_after_s = 5.0


class StorageFull(StorageError):  # noqa: N818 - a state of the disk, and the name the routes know
    """There is no space left for new data."""

    retry_after_s = 30.0


class QueueFull(StorageError):  # noqa: N818 - as above
    """Too many writes wait already, or another program holds the database's lock."""


class DatabaseSettings(Protocol):
    """The part of Settings that is needed here. data: the data folder; database: an SQLAlchemy URL, None for SQLite in
    `data`."""

    @property
    def data(self) -> Path: ...
    @property
    def database(self) -> str | None: ...


@dataclass(slots=True)
class _Job:
    run: Callable[[Connection], Any]
    future: Future[Any]
    essential: bool
    since: float  # monotonic
    started: bool = False
    outcome: Any = None
    failure: Exception | None = None


class Database:
    """Made by open_database(). `on_rollback`: called on the writer thread whenever something that a job wrote was
    undone, so that caches filled inside jobs can forget it."""

    def __init__(
        self,
        engine: Engine,
        *,
        reserve: Path | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.engine = engine
        self.on_rollback: list[Callable[[], None]] = []
        self.commits = 0
        self.jobs = 0
        self.full = False
        self._reserve, self._reserve_bytes = reserve, reserve_bytes
        self._max_waiting = max_waiting
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()  # of _waiting and _closing
        # A ring for every job. The writer waits here and not on a condition of the lock: with that it wakes only to
        # wait for the lock, and a write took three times the CPU.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._closing = False
        self._connection: Connection | None = None
        self._writer = threading.Thread(target=self._write_forever, name="perfagent-writer", daemon=True)
        self._fill_reserve()
        self._writer.start()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection inside one transaction: every query in the block sees the same state of the data."""
        with self.engine.connect() as connection, connection.begin():
            yield connection

    def submit(self, job: Callable[[Connection], T], *, essential: bool = False) -> Future[T]:
        """Runs the job on the writer thread; the future resolves after COMMIT, or with the job's own exception.

        essential: also while the disk is full, when everything else is refused. Raises QueueFull at once if too much
        waits.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closing:
                raise QueueFull("the database is being closed; send again when the server is back")
            if len(self._waiting) >= self._max_waiting:
                raise QueueFull(
                    f"{len(self._waiting)} writes wait already, {self._max_waiting} are allowed; send again later"
                )
            self._waiting.append(_Job(job, future, essential, time.monotonic()))
        self._bell.put(None)
        return future

    def write(self, job: Callable[[Connection], T], *, essential: bool = False) -> T:
        """submit() and wait. Never call it on the writer thread or on an event loop."""
        return self.submit(job, essential=essential).result()

    @property
    def is_alive(self) -> bool:
        """Whether the writer runs. Without it nothing is stored any more."""
        return self._writer.is_alive()

    @property
    def waiting(self) -> int:
        """Jobs that wait for the writer."""
        return len(self._waiting)

    def close(self) -> None:
        """Finishes what waits, then stops the writer and closes every connection."""
        with self._lock:
            self._closing = True
        self._bell.put(None)
        if self._writer is not threading.current_thread():
            self._writer.join()
        self.engine.dispose()

    # --- the writer thread --------------------------------------------------------------------------------------------

    def _write_forever(self) -> None:
        try:
            while True:
                with self._lock:
                    batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), MAX_BATCH))]
                    closed = self._closing and not batch
                if closed:
                    return
                if batch:
                    self._settle(self._admit(batch))
                else:
                    self._bell.get()  # the jobs behind some rings are done already: then it looks again
        finally:
            if self._connection is not None:
                self._connection.close()

    def _admit(self, batch: list[_Job]) -> list[_Job]:
        """The jobs that may run now: all of them, or only the essential ones while the disk is full."""
        batch = [job for job in batch if job.started or job.future.set_running_or_notify_cancel()]
        if self.full and not self._fill_reserve():
            for job in batch:
                if not job.essential:
                    _fail(job, _no_space())
            return [job for job in batch if job.essential]
        self.full = False
        return batch

    def _tell_of_rollback(self) -> None:
        for hook in self.on_rollback:
            try:
                hook()
            except Exception:
                log.exception("a cache could not forget what was rolled back")

    def _settle(self, batch: list[_Job]) -> None:
        """Runs and commits the jobs, and resolves every future whatever happens."""
        if not batch:
            return
        try:
            self._commit(batch)
        except Exception as error:  # noqa: BLE001 - the writer must outlive any failure; each caller gets the cause
            self._tell_of_rollback()
            cause: Exception = error
            if _is_full(error):
                self._release_reserve()
                cause = _no_space()
            elif _is_locked(error):
                self._wait_for_lock(batch)
                return
            for job in batch:
                _fail(job, cause)
            return
        self.commits += 1
        self.jobs += len(batch)
        for job in batch:
            if job.failure is not None:
                _fail(job, job.failure)
            else:
                job.future.set_result(job.outcome)

    def _commit(self, batch: list[_Job]) -> None:
        if self._connection is None:
            self._connection = self.engine.connect().execution_options(perfagent_write=True)
            self._connection.connection.cursor().execute(f"PRAGMA cache_size=-{_WRITER_CACHE_KIB}")
        connection = self._connection
        try:
            with connection.begin():
                if len(batch) == 1:  # no neighbor to protect: the transaction itself is undone with it
                    batch[0].outcome = batch[0].run(connection)
                    return
                for job in batch:
                    job.failure = None
                    try:
                        with connection.begin_nested():
                            job.outcome = job.run(connection)
                    except Exception as error:
                        if _is_full(error) or _is_locked(error):
                            raise
                        job.failure = error
                        self._tell_of_rollback()
        except Exception as error:
            if len(batch) == 1 and not isinstance(error, DBAPIError) and connection.in_transaction() is False:
                raise  # the job's own failure, undone in good order: the connection is as good as before
            self._drop_connection()
            raise

    def _drop_connection(self) -> None:
        """After SQLITE_FULL the transaction is gone already and a ROLLBACK fails: the next batch takes a fresh
        connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(DBAPIError, sqlite3.Error):
                connection.invalidate()
            connection.close()

    def _wait_for_lock(self, batch: list[_Job]) -> None:
        """Another program holds the lock: jobs go back to the front until their patience is over."""
        now = time.monotonic()
        again = []
        for job in batch:
            job.started = True
            if now - job.since < LOCK_PATIENCE_S and not self._closing:
                again.append(job)
            else:
                _fail(
                    job, QueueFull("another program has kept the database locked for more than 5 s; send again later")
                )
        with self._lock:
            self._waiting.extendleft(reversed(again))

    # --- space --------------------------------------------------------------------------------------------------------

    def _release_reserve(self) -> None:
        self.full = True
        if self._reserve is not None:
            self._reserve.unlink(missing_ok=True)

    def _fill_reserve(self) -> bool:
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


def open_database(
    settings: DatabaseSettings, *, reserve_bytes: int = RESERVE_BYTES, max_waiting: int = MAX_WAITING
) -> Database:
    """Opens, creates or upgrades the database. Raises ConfigError, with the file and the cure, if it must not be
    used."""
    path = sqlite_path(settings)
    _prepare(path)
    engine = sqlite_engine(path)
    try:
        _refuse_damage(path)
        _upgrade(engine, str(path))
        _grow_log(engine, path)
    except BaseException:
        engine.dispose()
        raise
    reserve = path.parent / RESERVE
    with contextlib.suppress(OSError):  # what it was called before
        (path.parent / _FORMER_RESERVE).rename(reserve)
    return Database(engine, reserve=reserve, reserve_bytes=reserve_bytes, max_waiting=max_waiting)


def database_url(settings: DatabaseSettings) -> URL | None:
    """Where the database is; None for SQLite in the data folder. Raises ConfigError for what is none, or none of
    ours."""
    if settings.database is None:
        return None
    try:
        url = make_url(settings.database)
    except ArgumentError as error:  # what was given is not shown: it may hold a password
        raise ConfigError(f"the database must be an address such as {_ADDRESS}; what was given is none") from error
    if url.get_backend_name() != "sqlite":
        raise ConfigError(
            f"the database must be SQLite, as {_ADDRESS}: {url.get_backend_name()} is not supported yet; "
            "leave the database out to have it in the data folder"
        )
    return url


def sqlite_path(settings: DatabaseSettings) -> Path:
    """The SQLite file these settings mean."""
    url = database_url(settings)
    if url is None:
        return Path(settings.data) / "perfagent.db"
    name = url.database
    if not name or name == ":memory:":
        raise ConfigError(
            f"database {settings.database!r} lives in memory and would be lost; give a file: sqlite:////path/perfagent.db"
        )
    return Path(name)


def sqlite_engine(path: Path) -> Engine:
    """An engine whose transactions really are SQLite's: reads BEGIN, the writer BEGIN IMMEDIATE."""
    options = {"check_same_thread": False, "timeout": LOCK_PATIENCE_S}
    engine = create_engine(
        f"sqlite:///{path}",
        pool_size=8,
        max_overflow=56,
        pool_use_lifo=True,  # the newest connection has the warmest cache, and idle ones hold no second copy of it
        connect_args=options,
    )

    @event.listens_for(engine, "connect")
    def configure(connection: sqlite3.Connection, _record: object) -> None:
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


def _refuse_damage(path: Path) -> None:
    """Never start on half the data. Files too large for a quick start are checked by their schema only."""
    cure = "restore it with `perfagent db restore`, or move the file away to start empty"
    try:
        connection = sqlite3.connect(path, timeout=LOCK_PATIENCE_S)
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


def _upgrade(engine: Engine, where: str) -> None:
    try:
        schema.upgrade(engine, where)
    except OperationalError as error:
        cure = "check that it can be reached and written, then start again"
        raise ResourceError(f"the database {where} cannot be upgraded ({error.orig}): {cure}") from error
    except DatabaseError as error:
        cure = "restore it with `perfagent db restore`, or move it away to start empty"
        raise ResourceError(f"the database {where} is damaged or not ours ({error.orig}): {cure}") from error


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


def _fail(job: _Job, error: Exception) -> None:
    job.future.set_exception(error)


def _no_space() -> StorageFull:
    return StorageFull(
        "the disk with the data folder is full: free some space or delete runs; agents then send the rest by themselves"
    )


def _sqlite_code(error: BaseException) -> int:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return (getattr(cause, "sqlite_errorcode", 0) or 0) & 0xFF  # extended codes keep the primary one in the low byte


def _is_full(error: BaseException) -> bool:
    return _sqlite_code(error) == sqlite3.SQLITE_FULL


def _is_locked(error: BaseException) -> bool:
    return _sqlite_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
