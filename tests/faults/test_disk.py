"""A15 to A17: a disk that refuses, a spool that is damaged, a spool that several processes want. The spool by itself,
without threads, is in tests/agent/delivery/test_spool.py."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import free_port, until
from faults import loops
from faults.accounts import Accounts, left_in, row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.delivery import backlog, orphans, segments, spool
from perfagent.delivery.spool import Header, Spool
from perfagent.governor import Governor
from perfagent.hooks.new_progress import new_progress
from perfagent.step.pending_logs import EarlyLog
from perfagent.wire import Group

pytestmark = pytest.mark.fault


# ---- A15


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "state"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    filler = disk / "filler"
    with filler.open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
    return filler


def test_a15_a_full_file_system_is_told_once_and_delivery_goes_on(
    small_disk: Path, fault: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    server = fault.server()
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(server)
        sender.rows.append(row(0))
        assert sender.flush(10)
        filler = fill(small_disk)
        for step in range(1, 200):
            sender.rows.append(row(step))
            time.sleep(0.005)
        assert sender.flush(10)
        assert sorted(server.values("loss")) == list(range(200))
        assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
        filler.unlink()
        until(
            lambda: (sender.event("phase", {}), sender.spool.error is None)[1],
            every_s=0.2,
            why="space is back unnoticed",
        )
        sender.close("finished", timeout_s=20.0)
        assert server.states() == ["finished"]


class Refusing:
    """Stands where segments write; refuses with an error while `error` is set, after half of what it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: int | None = None
        self.write = segments.write_whole
        for module in (segments, backlog, spool):
            monkeypatch.setattr(module, "write_whole", self)

    def __call__(self, fd: int, size: int, data: bytes) -> None:
        if self.error is None:
            self.write(fd, size, data)
            return
        real = os.write

        def half(fd: int, data: Any) -> int:
            if len(data) < 8:
                raise OSError(self.error, os.strerror(self.error or 0))
            return real(fd, bytes(data)[: len(data) // 2])

        try:
            segments.os.write = half
            self.write(fd, size, data)
        finally:
            segments.os.write = real


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EROFS", "EIO", "EFBIG"])
def test_a15_whatever_the_disk_says_samples_go_to_memory_and_to_the_disk_again_when_it_is_better(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: str
) -> None:
    disk = Refusing(monkeypatch)
    port = free_port()
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(f"http://127.0.0.1:{port}")
        sender.rows.append(row(0))
        until(lambda: sender.counters["rows"] == 1)
        disk.error = getattr(errno, error)
        for step in range(1, 50):
            sender.rows.append(row(step))
        until(lambda: sender.counters["rows"] == 50 and sender.spool.error is not None)
        assert sender.spool.counters["disk_errors"] >= 1
        disk.error = None
        sender.spool.files.retry_at = 0.0
        sender.rows.append(row(50))
        until(lambda: sender.counters["rows"] == 51 and sender.spool.error is None)
        assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
        sender.close("")
    kept = [step for frame in left_in(sender.spool.folder) for group in frame.groups for step in group.steps()]
    assert sorted(kept) == list(range(51)), "what was in memory is on the disk in the end, as the disk is well again"


def test_a15_a_log_that_waited_for_its_step_is_sent_from_memory_and_not_found_again(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, server = Refusing(monkeypatch), fault.server()
    sender = fault.sender(server)
    sender.progress = new_progress(sender.rows, Governor(0.5))
    log = EarlyLog(time.time(), time.monotonic(), {"x": 0.5})
    sender.rows.append(log)
    until(lambda: [*sender.spool.folder.glob("*.early")], why="it is not kept")
    disk.error = errno.ENOSPC
    log.settle(1)
    until(lambda: server.values("x") == {1: 0.5})
    assert not [*sender.spool.folder.glob("*.early")]
    disk.error = None


def test_a15_what_no_disk_ever_took_is_counted_and_told_at_the_end(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Refusing(monkeypatch).error = errno.ENOSPC
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(f"http://127.0.0.1:{free_port()}", max_memory_bytes=20_000)
        for step in range(5000):
            sender.rows.append((step, time.time() + step / 7, time.monotonic() + step / 3, ("loss",), (step / 11,)))
        until(lambda: sender.counters["rows"] == 5000)
        sender.close("")
    assert sender.spool.counters["dropped"] == 5000
    assert "5,000 samples are lost" in caplog.text


def test_a15_what_memory_held_to_the_end_and_no_disk_took_is_counted_too(
    fault: Accounts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Refusing(monkeypatch).error = errno.ENOSPC
    with caplog.at_level(logging.WARNING, "perfagent"):
        sender = fault.sender(f"http://127.0.0.1:{free_port()}")
        for step in range(50):
            sender.rows.append(row(step))
        until(lambda: sender.counters["rows"] == 50)
        sender.close("")
    assert sender.spool.counters["dropped"] == 100
    assert "100 samples are lost" in caplog.text


def test_a15_the_caps_of_a_sender_that_nobody_configured_are_those_that_are_promised(fault: Accounts) -> None:
    """What happens at them is tested with smaller ones; 512 MB of disk are A05's, 16 MB A08's, 2000 series A20's."""
    sender = fault.sender(f"http://127.0.0.1:{free_port()}", start=False)
    kept, columns = sender.spool._backlog, sender._dispatch()._columns
    assert (kept.max_bytes, kept.max_memory_bytes) == (512 * 2**20, 8 * 2**20)
    assert (spool.QUARANTINE_BYTES, columns.max_series) == (16 * 2**20, 2000)


def test_a15_a_lock_is_let_go_when_the_disk_refuses_the_rest_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = Spool(tmp_path / "s", Header(source="s", project="p", rank=0, server=None))
    original = segments.Segments.open_private

    def refuse(self: segments.Segments, name: str, flags: int) -> int:
        if name == "state":
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, name, flags)

    monkeypatch.setattr(segments.Segments, "open_private", refuse)
    assert not mine.create()
    monkeypatch.undo()
    assert mine.create(), "its own lock was in its way"


# ---- A16


def read_again(folder: Path) -> list[int]:
    """The steps that come out, twice: the second start must not find less than the first."""
    first = loops.steps_in(folder)
    opened = Spool.open(folder)
    opened.abandon()
    assert loops.steps_in(folder) == first
    return first


@pytest.mark.parametrize("kind", ["ticks", "frames"])
def test_a16_truncated_at_any_offset_what_is_whole_before_is_read(tmp_path: Path, kind: str) -> None:
    original = loops.damaged(tmp_path / "whole", kind).read_bytes()
    ends = [
        offset + segments.FRAMING.size + len(payload)
        for offset, found, payload in segments.records(original)
        if found in (segments.TICK, segments.FRAME)
    ]
    assert len(ends) == 4
    for cut in range(0, len(original), 1 if kind == "frames" else 7):  # of ticks, test_spool.py cuts at every offset
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / f"00000001.{kind}").write_bytes(original[:cut])
        opened = Spool.open(folder)
        found = []
        while (frame := opened.next()) is not None:
            found += [step for group in frame.groups for step in group.steps()]
            opened.ack(frame.seq)
        assert found == list(range(3 * sum(end <= cut for end in ends))), cut
        assert opened.counters["corrupt"] == 0
        opened.abandon()


@pytest.mark.parametrize("kind", ["ticks", "frames"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4),
    state=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 7)), max_size=4),
)
def test_a16_flipped_bits_in_any_file_never_stop_the_start_and_never_invent_or_double_samples(
    tmp_path: Path, kind: str, flips: list[tuple[float, int]], state: list[tuple[int, int]]
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    path = loops.damaged(folder, kind)
    content = bytearray(path.read_bytes())
    for place, bit in flips:
        content[int(place * len(content))] ^= 1 << bit
    path.write_bytes(content)
    slots = bytearray((folder / "state").read_bytes())
    for place, bit in state:
        slots[place] ^= 1 << bit
    (folder / "state").write_bytes(slots)
    found = read_again(folder)
    assert found == list(range(len(found)))
    whole = [found for _, found, _ in segments.records(bytes(content)) if found in (segments.TICK, segments.FRAME)]
    assert len(found) == 3 * len(whole)
    if segments.torn(bytes(content), 0) or len(whole) == 4:
        return
    assert list(folder.glob("*.corrupt")) or segments.torn(bytes(content), _end_of_whole(bytes(content)))


def _end_of_whole(data: bytes) -> int:
    return max(
        (offset + segments.FRAMING.size + len(payload) for offset, _, payload in segments.records(data)),
        default=len(segments.MAGIC) if data.startswith(segments.MAGIC) else 0,
    )


# ---- A17


def test_a17_eight_processes_that_start_at_once_deliver_what_the_dead_left_exactly_once(fault: Accounts) -> None:
    assert loops.eight_starts(fault.state, fault.server())


def test_a17_a_recycled_pid_and_a_stale_lock_file_keep_nobody_away(fault: Accounts) -> None:
    """The lock is the kernel's flock; what the file says is only for the watcher."""
    server = fault.server()
    loops.orphan(fault.state, "orphan", server.url)
    lock = fault.state / "spool" / "orphan" / "lock"
    lock.write_text(f"{os.getpid()} 1")  # a living process by that number, but another one
    sender = fault.sender(server)
    sender.rows.append(row(1))
    until(lambda: not lock.exists(), why="the orphan was never sent")
    assert sorted(server.values("loss", source="orphan")) == list(range(5))


def test_a16_what_of_an_orphan_could_not_be_read_is_told_with_its_file(
    fault: Accounts, caplog: pytest.LogCaptureFixture
) -> None:
    server = fault.server()
    loops.orphan(fault.state, "orphan", server.url)
    (path,) = (fault.state / "spool" / "orphan").glob("*.ticks")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    fault.sender(server).rows.append(row(1))
    until(lambda: "sent in part only" in caplog.text, why="nobody was told")
    (told,) = [record.getMessage() for record in caplog.records if "in part only" in record.getMessage()]
    assert f"left in {path.parent} was sent in part only; 1 file damaged" in told
    assert path.name + ".corrupt" in told
    assert sorted(server.values("loss", source="orphan")) == list(range(4))


def test_a17_thousands_that_others_left_are_looked_through_between_this_processes_own_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "AT_A_TIME_S", 0.0)  # each look takes longer than that
    for number in range(3):
        loops.orphan(tmp_path, f"other{number}", "http://127.0.0.1:1")
    loops.orphan(tmp_path, "ours", "http://127.0.0.1:2")
    os.utime(tmp_path / "spool" / "ours" / "lock", (time.time() + 60, time.time() + 60))  # the last of them
    found = orphans.Orphans(tmp_path / "spool", tmp_path / "own", "http://127.0.0.1:2")
    looks = 0
    while found.current is None and (look := found.errand()) is not None:
        look()
        looks += 1
    assert looks == 4
    assert found.current is not None
    assert found.current.folder.name == "ours"
    found.close()


@pytest.mark.parametrize(("minutes", "taken"), [(-5, True), (5, False)])
def test_a11_what_lies_there_for_more_than_a_week_is_left_to_perfagent_sync(
    fault: Accounts, minutes: int, taken: bool
) -> None:
    server = fault.server()
    loops.orphan(fault.state, "orphan", server.url)
    folder = fault.state / "spool" / "orphan"
    at = time.time() - 7 * 86400 - 60 * minutes
    for path in (*folder.iterdir(), folder):
        os.utime(path, (at, at))
    sender = fault.sender(server)
    sender.rows.append(row(1))
    until(lambda: sender._dispatch().orphans.done, why="orphans were never looked for")
    until(lambda: folder.exists() is not taken)
    assert sorted(server.values("loss", source="orphan")) == (list(range(5)) if taken else [])


def test_a17_what_was_meant_for_another_server_is_not_sent_to_this_one(fault: Accounts) -> None:
    elsewhere = fault.sender(f"http://127.0.0.1:{free_port()}")
    elsewhere.rows.append(row(1))
    until(lambda: elsewhere.counters["rows"] == 1)
    elsewhere.close("finished")
    server = fault.server()
    sender = fault.sender(server)
    sender.rows.append(row(2))
    until(lambda: sender._dispatch().orphans.done, why="orphans were never looked for")
    assert sorted(server.values("loss")) == [2]
    assert elsewhere.spool.folder.exists()


def test_a17_what_never_learned_its_run_is_left_for_later(fault: Accounts) -> None:
    server = fault.server()
    unknown = Spool(fault.state / "spool" / "unknown", Header(source="unknown", project="p", rank=1, server=server.url))
    unknown.append([Group(step=[1], time=[1.0], monotonic=[1.0], values={"loss": [1.0]})], [], now=0.0)
    unknown.abandon()
    sender = fault.sender(server)
    sender.rows.append(row(2))
    until(lambda: sender._dispatch().orphans.done, why="orphans were never looked for")
    assert {frame.run for frame in server.frames} == {"r"}
    assert unknown.folder.exists()
