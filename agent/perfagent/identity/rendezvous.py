"""Lets the ranks of a job agree on run, attempt and start step, without a collective and without waiting."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from perfagent.identity.launchers import STORE_ERRORS, sweep
from perfagent.identity.naming import draw_id
from perfagent.identity.process_group import ALONE_AFTER_S, in_group
from perfagent.identity.slurm import number
from perfagent.process.pids import process_start

__all__ = ["STORE_KEY", "Meeting", "Member"]

STORE_KEY = "perfagent/run"
_MOST_FAILURES = 10


@dataclass(slots=True, kw_only=True)
class Member:
    """A rank's knowledge of its job, part of it from rank 0."""

    run: str | None = None
    attempt: int = 0
    rank: int = 0
    start_step: int | None = None
    begun: Callable[[], bool] = field(default=lambda: False, repr=False)
    """Whether the first step of this run is over, or the run."""
    ended: Callable[[], bool] = field(default=lambda: False, repr=False)

    @property
    def known(self) -> bool:
        return self.run is not None and self.attempt > 0


class _Announcement(msgspec.Struct):
    """What rank 0 publishes. pid, pid_start: of its process; restart: how often torchrun had restarted it."""

    run: str
    attempt: int
    start_step: int | None
    restart: int
    pid: int
    pid_start: int


class Meeting:
    """Where rank 0 leaves run, attempt and start step for the others: a file for its node, the job's store for other
    nodes."""

    def __init__(self, folder: Path, key: str | None, env: Mapping[str, str], started: int, ordinal: int) -> None:
        """key: the same for all ranks of a node, and of one node only. ordinal: which run of this process it is."""
        self._path = folder / (f"{key}-{ordinal}.json" if ordinal else f"{key}.json") if key else None
        self._restart = number(env, "TORCHELASTIC_RESTART_COUNT") or 0
        self._elastic = env.get("TORCHELASTIC_RESTART_COUNT") is not None
        self._by_hand = not self._elastic and bool(env.get("RANK"))
        self._in_group = False  # at any time
        self._store_key = f"{STORE_KEY}/{self._restart}/{ordinal}"
        self.started = started
        self._since = time.monotonic()
        self._store: Any = None
        self._store_failed = 0
        self._filed = self._stored = False
        self._next_store = 0.0

    @property
    def publishing(self) -> bool:
        """Whether rank 0 still waits for the job's store, which often comes long after it knows the run's id."""
        return not self._stored and self._store_failed < _MOST_FAILURES

    def publish_again(self) -> None:
        """Rank 0 has another run than it published first."""
        self._filed = self._stored = False

    def poll(self, mine: Member) -> bool:
        """True if there is no job: this rank is alone."""
        self._in_group = self._in_group or in_group()
        if mine.rank == 0:
            self._settle(mine)
            self._publish(mine)
        elif not mine.known:
            return self._learn(mine)
        return False

    def _settle(self, mine: Member) -> None:
        """Rank 0 decides. After a launcher's restart the run keeps the id of the attempt before."""
        if mine.run is None:
            earlier = self._read_file()
            mine.run = earlier.run if earlier and self._elastic else draw_id()
        mine.attempt = mine.attempt or self.started

    def _publish(self, mine: Member) -> None:
        store = None if self._stored else self._find_store()
        if store is None and (self._filed or self._path is None):
            return
        said = _Announcement(
            str(mine.run), mine.attempt, mine.start_step, self._restart, os.getpid(), process_start(os.getpid())
        )
        message = msgspec.json.encode(said)
        if self._path is not None and not self._filed:
            self._filed = True
            temporary = self._path.with_suffix(f".{os.getpid()}")
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                sweep(self._path.parent)
                fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(fd, "wb") as file:
                    file.write(message)
                temporary.replace(self._path)
        if store is not None:
            try:
                store.set(self._store_key, message.decode())
                self._stored = True
            except STORE_ERRORS:  # the file and a later try remain
                self._lose_store()

    def _learn(self, mine: Member) -> bool:
        found = self._read_file()
        if found is None or not self._fits(found):
            found = self._read_store()
        if found is not None:
            # a rank that has loaded a checkpoint knows its run, whatever rank 0 said before it loaded the same one
            mine.run, mine.attempt = mine.run or found.run, found.attempt
            mine.start_step = found.start_step if mine.start_step is None else mine.start_step
        elif self._by_hand and not self._in_group and self._has_waited(mine):
            return True
        elif time.monotonic() - self._since > ALONE_AFTER_S and mine.run is not None:
            mine.attempt = mine.attempt or self.started  # a named run without a meeting place: better than none
        return False

    def _has_waited(self, mine: Member) -> bool:
        """Whether a rank in no group need look no longer for the others: its variables may be an earlier training's."""
        return mine.ended() or (mine.begun() and (self._path is None or time.monotonic() - self._since > ALONE_AFTER_S))

    def _fits(self, found: _Announcement) -> bool:
        """Whether the file is of this start of the job. Outside torchrun the key may be an older job's: its rank 0 must live."""
        return found.restart == self._restart if self._elastic else process_start(found.pid) == found.pid_start != 0

    def _read_file(self) -> _Announcement | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return None if self._path is None else msgspec.json.decode(self._path.read_bytes(), type=_Announcement)
        return None

    def _read_store(self) -> _Announcement | None:
        store, key = self._find_store(), self._store_key
        try:
            if store is not None and store.check([key]):
                return msgspec.json.decode(store.get(key), type=_Announcement)
        except STORE_ERRORS:  # its host is gone
            self._lose_store()
        return None

    def _find_store(self) -> Any:
        """The job's key-value store, once torch.distributed has one; tried once a second, given up after ten failures."""
        now = time.monotonic()
        if self._store is None and self._store_failed < _MOST_FAILURES and now >= self._next_store and in_group():
            self._next_store = now + 1.0
            try:
                store = sys.modules["torch.distributed"].distributed_c10d._get_default_store()
                self._store = store.clone()  # one connection must not be shared by two threads
            except STORE_ERRORS:  # the store of a job that ends, or of a backend without clone()
                self._store_failed += 1
        return self._store

    def _lose_store(self) -> None:
        self._store = None
        self._store_failed += 1
