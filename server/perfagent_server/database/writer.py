"""The one database: a pool for reading, and one thread that owns every write.

Writes are jobs. The writer takes all jobs that wait, runs each in its own savepoint inside one transaction, commits
once and only then resolves their futures. One fsync is thus shared by everyone who waited, and no two parts of the
server ever fight for a lock.

While the disk is full, further writes are refused with StorageFull except the `essential` ones (deletions, alerts), for
which the backend keeps a reserve. Reading goes on all the while.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from perfagent_server.database.backend import PATIENCE_S, Backend, Trouble
from perfagent_server.database.errors import QueueFull, StorageError, StorageFull, Unreachable, Unsure

log = logging.getLogger("perfagent.server")

__all__ = ["MAX_BATCH", "MAX_WAITING", "Database"]

T = TypeVar("T")

MAX_WAITING = 20_000  # jobs; far above what a healthy writer ever leaves waiting
MAX_BATCH = 256  # jobs in one commit: bounds how long the first of them waits for the last
_PAUSE_S = 0.2  # between two tries to connect


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
    undone, so that caches filled inside jobs can forget it. `on_commit`: called there after each commit, with the seconds
    that its jobs and the commit itself took. patience_s: how long a write waits for a lock or a connection before its
    caller is asked to come back."""

    def __init__(self, backend: Backend, *, max_waiting: int = MAX_WAITING, patience_s: float = PATIENCE_S) -> None:
        self.backend, self._patience_s = backend, patience_s
        self.on_rollback: list[Callable[[], None]] = []
        self.on_commit: list[Callable[[float], None]] = []
        self.commits = 0
        self.jobs = 0
        self.full = False
        self.out_of_reach = ""
        """Why no write has been possible since the last one failed; empty while writes are stored."""
        self._max_waiting = max_waiting
        self._waiting: deque[_Job] = deque()
        self._lock = threading.Lock()  # of _waiting and _closing
        # A ring for every job. The writer waits here and not on a condition of the lock: with that it wakes only to
        # wait for the lock, and a write took three times the CPU.
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._closing = False
        self._closed = False
        self._connection: Connection | None = None
        self._writer = threading.Thread(target=self._write_forever, name="perfagent-writer", daemon=True)
        self._writer.start()

    @property
    def engine(self) -> Engine:
        """SQLAlchemy's, for its dialect."""
        return self.backend.engine

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection inside one transaction: every query in the block sees the same state of the data. Raises
        StorageError if the database cannot be asked now, or is closed."""
        if self._closed:
            raise Unreachable("the database is closed")
        with self._in_words(), self.backend.read() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Driver errors about the database itself become StorageErrors."""
        try:
            yield
        except Exception as error:
            trouble = self.backend.trouble(error)
            if trouble is None:
                raise
            raise _told(trouble) from error

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

    @contextlib.contextmanager
    def alone_with(self, names: Collection[str]) -> Iterator[None]:
        """No other server of this database is in here with one of these names meanwhile. Costs nothing where this server is
        the only one. Raises StorageError when the database cannot be asked."""
        with self._in_words(), self.backend.alone_with(names):
            yield

    @property
    def is_shared(self) -> bool:
        """Whether other servers use the database, too."""
        return bool(self.backend.replica)

    @property
    def size_bytes(self) -> int:
        """Of all that is stored; 0 where that is not known."""
        return self.backend.size_bytes

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
        self._closed = True
        self.backend.close()

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
        if self.full and not self.backend.has_room():
            for job in batch:
                if not job.essential:
                    job.future.set_exception(_told(Trouble.FULL))
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
        begin = time.monotonic()
        try:
            is_decided = self._commit(batch)
        except Exception as error:  # noqa: BLE001 - the writer must outlive any failure; each caller gets the cause
            self._tell_of_rollback()
            self._fail(batch, error)
            return
        if not is_decided:
            self._tell_of_rollback()
            for job in batch:
                job.future.set_exception(
                    Unsure("the connection to the database was lost during a commit; send again later")
                )
            return
        self.out_of_reach = ""
        self.commits += 1
        self.jobs += len(batch)
        for hook in self.on_commit:
            hook(time.monotonic() - begin)
        for job in batch:
            if job.failure is not None:
                job.future.set_exception(job.failure)
            else:
                job.future.set_result(job.outcome)

    def _commit(self, batch: list[_Job]) -> bool:
        """False: the connection was lost during COMMIT, and nobody knows what became of it. The batch's jobs must not run
        again."""
        connection = self._connected()
        try:
            transaction = connection.begin()
            try:
                self.backend.take_turn(connection)
                self._run(batch, connection)
            except BaseException:
                transaction.rollback()
                raise
            try:
                transaction.commit()
            except Exception as error:
                if self.backend.trouble(error) is not Trouble.LOST:
                    raise
                self._drop_connection()
                return False
        except Exception as error:
            is_own = not isinstance(error, SQLAlchemyError) and self.backend.trouble(error) is None
            if len(batch) == 1 and is_own and connection.in_transaction() is False:
                raise  # the job's own failure, undone in good order: the connection is as good as before
            self._drop_connection()
            raise
        return True

    def _run(self, batch: list[_Job], connection: Connection) -> None:
        if len(batch) == 1:  # no neighbor to protect: the transaction itself is undone with it
            batch[0].outcome = batch[0].run(connection)
            return
        for job in batch:
            job.failure = None
            try:
                with connection.begin_nested():
                    job.outcome = job.run(connection)
            except Exception as error:
                if self.backend.trouble(error) is not None:
                    raise
                job.failure = error
                self._tell_of_rollback()

    def _connected(self) -> Connection:
        if self._connection is None:
            self._connection = self.backend.writer()
        return self._connection

    def _drop_connection(self) -> None:
        """After an error the transaction may be gone already, and a ROLLBACK would fail: the next batch takes a fresh
        connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                connection.invalidate()
            with contextlib.suppress(Exception):
                connection.close()

    def _fail(self, batch: list[_Job], error: Exception) -> None:
        trouble = Trouble.LOST if isinstance(error, Unreachable) else self.backend.trouble(error)
        if trouble in (Trouble.BUSY, Trouble.LOST):
            self._try_again(batch, trouble, error if isinstance(error, StorageError) else _told(trouble))
            return
        if trouble is Trouble.FULL:
            self.full = True
            self.backend.use_reserve()
        cause = error if trouble is None else _told(trouble)
        for job in batch:
            job.future.set_exception(cause)

    def _try_again(self, batch: list[_Job], trouble: Trouble, told: StorageError) -> None:
        """Nothing of the jobs was stored: they go back to the front until their patience is over."""
        now = time.monotonic()
        again = []
        for job in batch:
            job.started = True
            if now - job.since < self._patience_s and not self._closing:
                again.append(job)
            else:
                job.future.set_exception(told)
                self.out_of_reach = str(told) if trouble is Trouble.LOST else ""
        if again and trouble is Trouble.LOST:
            time.sleep(_PAUSE_S)
        with self._lock:
            self._waiting.extendleft(reversed(again))


def _told(trouble: Trouble) -> StorageError:
    if trouble is Trouble.FULL:
        return StorageFull(
            "the disk with the data folder is full: free some space or delete runs; agents then send the rest by themselves"
        )
    if trouble is Trouble.BUSY:
        return QueueFull("another program keeps the database locked; send again later")
    return Unreachable("the database cannot be reached now; send again later")
