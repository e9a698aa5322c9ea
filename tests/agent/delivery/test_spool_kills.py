"""A11: killed at any system call that changes a file, its successor at another one: each sample that the spool had
taken reaches the server, under one number and no other. A15: the same of a disk on which any of these calls fails,
where nobody is killed."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent.delivery.test_spool import header, rows
from case_selection import everyday
from ticks import tick_of

from perfagent.delivery.spool import Outgoing, Spool
from perfagent.wire import Event

pytestmark = pytest.mark.fault

SEEDS = (0, 7)
"""Between them: a file that goes with its last frame, ticks that were left beside the frame of them, an end at which
all goes."""
FULL = ("open", "write", "truncate", "rename", "replace", "link", "mkdir")
"""What fails on a full disk: files can go, and the state is written in place."""
FAILING = (*FULL, "pwrite", "unlink")
CALLS = (*FAILING, "ftruncate", "rmdir", "close")


class Killed(BaseException):
    """No code of ours may catch it, as none can catch a kill."""


@contextlib.contextmanager
def calls_by(instead: Callable[..., Any], names: Iterable[str]) -> Iterator[None]:
    """instead(name, real, arguments...) is what these calls of the module os do."""
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, functools.partial(instead, name, getattr(os, name)))
        yield


class Process:
    """Dies at its `last` system call, before it or (torn) in the midst of what it writes: from then on no file
    changes."""

    def __init__(self, last: int, *, torn: bool = False) -> None:
        self.last, self.torn = last, torn
        self.calls = 0
        self.fds: set[int] = set()

    @contextlib.contextmanager
    def lives(self) -> Iterator[None]:
        with calls_by(self._call, CALLS), contextlib.suppress(Killed):
            yield
        for fd in self.fds:  # the kernel's part
            os.close(fd)

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls >= self.last:
            if self.torn and self.calls == self.last and name in ("write", "pwrite"):
                real(args[0], bytes(args[1])[: len(args[1]) // 2], *args[2:])
            raise Killed
        found = real(*args, **named)
        if name == "open":
            self.fds.add(found)
        elif name == "close":
            self.fds.discard(args[0])
        return found


class Disk:
    """Fails `count` calls from the `first` on; a full one takes a part of what is written first."""

    def __init__(self, first: int, count: int, error: int) -> None:
        self.failing, self.error = range(first, first + count), error
        self.calls = 0

    def fails(self) -> contextlib.AbstractContextManager[None]:
        return calls_by(self._call, FULL if self.error == errno.ENOSPC else FAILING)

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **named: Any) -> Any:
        self.calls += 1
        if self.calls not in self.failing:
            return real(*args, **named)
        if name == "write" and self.error == errno.ENOSPC and self.calls == self.failing.start:
            return real(args[0], bytes(args[1])[: len(args[1]) // 2])
        raise OSError(self.error, os.strerror(self.error))


class Books:
    """What the spool took and what the server has: its ledger drops a number that it knows."""

    def __init__(self) -> None:
        self.taken: set[int] = set()
        self.tried: set[int] = set()
        self.ledger: dict[int, list[int]] = {}
        self.events: dict[int, list[Event]] = {}

    def receive(self, frame: Outgoing) -> None:
        steps = sorted(round(1 / value) - 1 for group in frame.groups for value in group.column("loss"))
        assert self.ledger.setdefault(frame.seq, steps) == steps, f"number {frame.seq} was given to other samples"
        assert self.events.setdefault(frame.seq, frame.events) == frame.events

    def check(self) -> None:
        stored = sorted(step for steps in self.ledger.values() for step in steps)
        assert len(stored) == len({*stored}), "counted twice"
        assert self.taken <= {*stored}, "lost"
        assert {*stored} <= self.tried, "invented"


def live(folder: Path, books: Books, chance: random.Random) -> Spool:
    """What an agent does with its spool: a server that comes and goes, halves of frames, refusals, an end."""
    spool = Spool(folder, header())
    now, step = 0.0, 0
    for _ in range(40):
        now += chance.choice([0.1, 0.5, 70.0])
        spool.retry_at = 0.0  # as late as that
        what = chance.choice(
            ["rows", "rows", "rows", "event", "hold", "identify", "send", "send", "cut", "split", "refuse"]
        )
        if what in ("rows", "event"):
            steps = range(step, step + chance.randrange(1, 6))
            step = steps.stop
            books.tried.update(steps)
            event = Event(kind="alert", time=float(step), data={"title": "x"})
            written = spool.append(*tick_of(rows(steps.start, len(steps)), [event] if what == "event" else []), now=now)
            books.taken.update(steps if written else ())
        elif what == "hold":
            spool.hold(now=now)
        elif what == "identify":
            spool.identify(run="r", attempt=1, name=None, project="p")
        elif (frame := spool.next()) is not None:
            if frame.seq not in books.ledger:
                if what == "split" and spool.split(frame.seq):
                    continue
                books.receive(frame)
                if what == "refuse":  # it is in the quarantine then
                    spool.quarantine(frame.seq, "no")
                    continue
            if what == "cut":
                spool.hold(now=now)
            else:
                spool.ack(frame.seq)
    spool.close(final="finished")
    return spool


def succeed(folder: Path, books: Books) -> None:
    """What the next start and `perfagent sync` do with it."""
    with contextlib.suppress(FileNotFoundError):
        spool = Spool.open(folder)
        while (frame := spool.next()) is not None:
            assert spool.header.run == "r"
            books.receive(frame)
            spool.ack(frame.seq)
        assert not spool.counters["corrupt"]
        spool.remove()


@pytest.mark.parametrize("listed", everyday(1, ["first to last", "last to first"]))
@pytest.mark.parametrize("torn", [False, True])
def test_a11_killed_at_any_call_all_arrives_once(tmp_path, monkeypatch, torn, listed):
    as_it_comes = Path.iterdir  # each file system lists a folder in an order of its own
    monkeypatch.setattr(
        Path, "iterdir", lambda self: iter(sorted(as_it_comes(self), reverse=listed == "last to first"))
    )
    for seed in SEEDS:
        last, ended = 1, False
        while not ended:
            folder, books = tmp_path / f"{seed}-{last}", Books()
            process = Process(last, torn=torn)
            with process.lives():
                live(folder, books, random.Random(seed))
                ended = True
            for successor in (Process(1 + (7 * last + seed) % 16, torn=torn), Process(10**9)):
                with successor.lives():
                    succeed(folder, books)
            books.check()
            last += 1


@pytest.mark.parametrize(
    ("error", "count"),
    [(errno.ENOSPC, 1), (errno.ENOSPC, 5), (errno.ENOSPC, 10**9), (errno.EIO, 1), (errno.EIO, 5)],
    ids=["full once", "full for a while", "full for good", "one error", "errors for a while"],
)
def test_a15_whichever_call_fails_nothing_goes_uncounted(tmp_path: Path, error: int, count: int) -> None:
    first, reached = 1, True
    while reached:
        folder, books = tmp_path / str(first), Books()
        disk = Disk(first, count, error)
        with disk.fails():
            spool = live(folder, books, random.Random(first))
        succeed(folder, books)
        stored = [step for steps in books.ledger.values() for step in steps]
        assert len(stored) == len({*stored}), f"counted twice, call {first}"
        gone = len(books.tried) - len(stored)  # the server may have what was counted as gone, where its answer was lost
        assert gone <= spool.counters["dropped"], f"lost without a word, call {first}"
        reached = disk.calls >= first
        first += 1
