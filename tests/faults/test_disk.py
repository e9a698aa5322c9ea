"""A15 to A17: a disk that refuses, a spool that is damaged, a spool that several processes want, by whole senders. The
spool by itself is in tests/agent/delivery/test_spool.py."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import until
from driven_sender import Driven, row, steps_in
from faults import loops
from faults.accounts import Accounts, left_in
from recording_transport import RecordingTransport
from ticks import tick_of

from perfagent.delivery.spool import Header, Spool
from perfagent.errors import ServerUnreachable
from perfagent.wire import Group

pytestmark = pytest.mark.fault
HERE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "perfagent")
    return caplog


# ---- A15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "state"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.real
def test_a15_full_file_system_is_told_once_and_delivery_goes_on(small_disk, fault, told):
    server = fault.server()
    sender = fault.sender(server)
    sender.rows.append(row(0))
    assert sender.flush(10)
    filler = small_disk / "filler"
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    for step in range(1, 200):
        sender.rows.append(row(step))
        time.sleep(0.005)
    assert sender.flush(10)
    assert sorted(server.values("loss")) == list(range(200))
    assert len([r for r in told.records if "cannot be written" in r.message]) == 1
    filler.unlink()
    until(lambda: (sender.event("phase", {}), sender.spool.error is None)[1], why="space is back unnoticed")
    sender.close("finished", timeout_s=20.0)
    assert server.states() == ["finished"]


class Refusing:
    """Every write of this thread is refused with `error` while it is set, after half of what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: int | None = None) -> None:
        self.error, self._write, self._here = error, os.write, threading.get_ident()
        monkeypatch.setattr(os, "write", self)

    def __call__(self, fd: int, data: Any) -> int:
        if self.error is None or threading.get_ident() != self._here or fd < 3:
            return self._write(fd, data)
        if len(data) < 8:
            raise OSError(self.error, os.strerror(self.error))
        return self._write(fd, bytes(data)[: len(data) // 2])


class Away(RecordingTransport):
    """A server that is away for good."""

    def post(self, *_: Any, **__: Any) -> Any:
        raise ServerUnreachable("refused")


def test_a15_samples_wait_in_memory_until_the_disk_is_better(tmp_path, monkeypatch, told):
    disk, one = Refusing(monkeypatch), Driven(tmp_path, Away())
    one.goes_on(1, map(row, range(3)))
    disk.error = errno.EROFS
    one.goes_on(3, map(row, range(3, 20)))
    assert one.sender.spool.error is not None
    assert one.sender.spool.counters["disk_errors"] >= 1
    disk.error = None
    one.goes_on(2, map(row, range(20, 25)))
    assert one.sender.spool.error is None
    assert len([r for r in told.records if "cannot be written" in r.message]) == 1
    one.end()
    kept = [step for frame in left_in(one.sender.spool.folder) for group in frame.groups for step in group.steps()]
    assert sorted(kept) == list(range(25))


@pytest.mark.parametrize(("rows", "memory"), [(5000, 20_000), (50, 2**23)])
def test_a15_what_no_disk_ever_took_is_counted_and_told(tmp_path, monkeypatch, told, rows, memory):
    """More than memory may hold, and what it held to the end."""
    Refusing(monkeypatch, errno.ENOSPC)
    one = Driven(tmp_path, Away(), max_memory_bytes=memory)
    one.sender.rows.extend(row(step, step / 11) for step in range(rows))
    one.goes_on(2).end()
    assert one.sender.spool.counters["dropped"] == 2 * rows
    assert f"{2 * rows:,} samples are lost" in told.text


# ---- A16, A17: what dead processes left


def drive(one: Driven) -> None:
    """Until everything that dead processes left was sent or passed by."""
    one.goes_on(1, [row(1)])
    until(lambda: one.goes_on(0.3).sender.send_loop.exchange.orphans.done, why="orphans were never looked for")
    one.end()


def sent_of(one: Driven, source: str) -> list[int]:
    return steps_in(frame for (of, _), frame in one.transport.stored.items() if of == source)


def test_a16_what_of_an_orphan_could_not_be_read_is_told(tmp_path: Path, told: pytest.LogCaptureFixture) -> None:
    one = Driven(tmp_path)
    loops.orphan(tmp_path / "state", "orphan", HERE)
    (path,) = (tmp_path / "state" / "spool" / "orphan").glob("*.ticks")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    drive(one)
    (message,) = [record.getMessage() for record in told.records if "in part only" in record.getMessage()]
    assert f"1 file in {path.parent} damaged" in message
    assert sent_of(one, "orphan") == list(range(4))


@pytest.mark.real
def test_a17_eight_starts_at_once_deliver_orphans_exactly_once(fault: Accounts) -> None:
    assert loops.eight_starts(fault.state, fault.server())


@pytest.mark.parametrize(
    "case", ["a recycled pid", "a week less 5 minutes", "a week and 5 minutes", "elsewhere", "no run"]
)
def test_a17_orphan_is_sent_if_young_and_for_this_server(tmp_path: Path, case: str) -> None:
    """What is older, or of a rank that never learned its run, is left to `perfagent sync`. The lock is the kernel's; what
    its file says is only for the watcher."""
    folder = tmp_path / "state" / "spool" / "orphan"
    if case == "no run":
        spool = Spool(folder, Header(source="orphan", project="p", rank=1, server=HERE))
        spool.append(*tick_of([Group(step=[1], time=[1.0], monotonic=[1.0], values={"loss": [1.0]})]), now=0.0)
        spool.abandon()
    else:
        loops.orphan(tmp_path / "state", "orphan", "http://127.0.0.1:8" if case == "elsewhere" else HERE)
    (folder / "lock").write_text(f"{os.getpid()} 1")  # a living process by that number, but another one
    if "week" in case:
        at = time.time() - 7 * 86400 + (300 if "less" in case else -300)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (at, at))
    one = Driven(tmp_path)
    drive(one)
    taken = case in ("a recycled pid", "a week less 5 minutes")
    assert folder.exists() is not taken
    assert sent_of(one, "orphan") == (list(range(5)) if taken else [])
    assert sent_of(one, one.sender.identity.source) == [1]
