from __future__ import annotations

import errno
import math
import os
import random
import resource
import shutil
import stat
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfagent.delivery import segments
from perfagent.delivery.columns import pack
from perfagent.delivery.drafts import Draft
from perfagent.delivery.segments import SpoolVersionError
from perfagent.delivery.spool import Header, Outgoing, Spool, SpoolBusyError, folders
from perfagent.wire import Event, Group


def header(source: str = "s") -> Header:
    return Header(source=source, project="p", rank=0, server="http://127.0.0.1:1", run="r", attempt=1)


def rows(first: int, count: int = 3) -> list[Group]:
    steps = list(range(first, first + count))
    times = [1e9 + step for step in steps]
    return [Group(step=steps, time=times, monotonic=times, values={"loss": pack([1.0 / (1 + s) for s in steps])})]


def event(text: str = "x") -> Event:
    return Event(kind="alert", time=1.0, data={"title": text})


def steps_of(*frames: Outgoing) -> list[int]:
    return [step for frame in frames for group in frame.groups for step in group.steps()]


def drain(spool: Spool) -> list[Outgoing]:
    sent = []
    while (outgoing := spool.next()) is not None:
        sent.append(outgoing)
        spool.ack(outgoing.seq)
    return sent


def crash(spool: Spool) -> None:
    """What kill -9 leaves: the files as they are, the lock free."""
    spool.abandon()


def test_what_was_appended_comes_out_once_and_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    for tick in range(5):
        assert spool.append(rows(3 * tick), [], now=0.0)
    assert steps_of(*drain(spool)) == list(range(15))
    assert spool.next() is None
    assert spool.waiting == 0


@pytest.mark.fault
def test_x11_folder_and_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        spool = Spool(tmp_path / "state" / "spool" / "s", header())
        spool.append(rows(0), [], now=0.0)
        spool.hold(now=1e9, force=True)
        spool.append(rows(3), [], now=0.0)
    finally:
        os.umask(before)
    for folder in (tmp_path / "state", tmp_path / "state" / "spool", spool.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    files = list(spool.folder.iterdir())
    assert {path.suffix for path in files} >= {".ticks", ".frames"}
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.fault
def test_a11_a_killed_process_leaves_all_that_was_appended(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [event()], now=0.0)
    crash(spool)
    again = Spool.open(tmp_path / "s")
    (frame,) = drain(again)
    assert steps_of(frame) == [0, 1, 2]
    assert [e.data for e in frame.events] == [{"title": "x"}]
    assert again.header.run == "r"


@pytest.mark.fault
def test_a11_a_frame_sent_before_the_crash_is_sent_again_under_the_same_number(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    first = spool.next()
    assert first is not None
    spool.append(rows(3), [], now=0.0)  # came while the frame was on its way
    crash(spool)
    again, rest = drain(Spool.open(tmp_path / "s"))
    assert (again.seq, again.groups, again.events) == (first.seq, first.groups, first.events)
    assert rest.seq > first.seq
    assert steps_of(rest) == [3, 4, 5]


@pytest.mark.fault
def test_a11_acknowledged_frames_are_not_sent_again(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    drain(spool)
    spool.append(rows(3), [], now=0.0)
    crash(spool)
    assert steps_of(*drain(Spool.open(tmp_path / "s"))) == [3, 4, 5]


def test_while_the_server_is_away_ticks_become_compressed_frames_and_their_files_go(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    for minute in range(3):
        for tick in range(10):
            spool.append(rows(30 * minute + 3 * tick), [], now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
    assert len(list(spool.folder.glob("*.ticks"))) == 0
    assert len(list(spool.folder.glob("*.frames"))) == 1
    crash(spool)
    again = Spool.open(tmp_path / "s")
    frames = drain(again)
    assert [frame.seq for frame in frames] == [1, 2, 3]
    assert steps_of(*frames) == list(range(90))
    again.close()
    assert not list(again.folder.glob("*.frames"))


def test_the_frame_on_its_way_keeps_number_and_content_when_the_server_goes_away(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    sent = spool.next()
    spool.append(rows(3), [], now=0.0)
    spool.hold(now=1e9)
    assert sent is not None
    crash(spool)
    first, second = drain(Spool.open(tmp_path / "s"))
    assert (first.seq, first.groups) == (sent.seq, sent.groups)
    assert steps_of(second) == [3, 4, 5]


@pytest.mark.fault
def test_a07_a_frame_that_is_too_large_is_halved_down_to_one_row(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0, 5), [event()], now=0.0)
    sizes = []
    stored: list[int] = []
    while (frame := spool.next()) is not None:
        count = sum(group.rows for group in frame.groups) + len(frame.events)
        sizes.append(count)
        if count > 1:
            assert spool.split(frame.seq)
        else:
            assert not spool.split(frame.seq)
            stored += steps_of(frame)
            spool.ack(frame.seq)
    assert sorted(stored) == [0, 1, 2, 3, 4]
    assert sizes.count(1) == 6


@pytest.mark.fault
def test_a07_a_crash_right_after_halving_sends_the_halves_and_not_the_whole(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0, 4), [], now=0.0)
    frame = spool.next()
    assert frame is not None
    spool.files.write_state = lambda: True  # type: ignore[method-assign] # the process dies before this
    assert spool.split(frame.seq)
    crash(spool)
    halves = drain(Spool.open(tmp_path / "s"))
    assert frame.seq not in [half.seq for half in halves]
    assert steps_of(*halves) == [0, 1, 2, 3]


@pytest.mark.fault
def test_a08_what_the_server_refuses_is_set_aside_up_to_the_limit(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    noise = random.Random(0)
    clock = [0.01 * row for row in range(100_000)]
    values = {name: [noise.random() for _ in clock] for name in "xyz"}  # 2 MB that hardly get smaller
    group = Group(step=list(range(100_000)), time=clock, monotonic=clock, values=values)
    kept: list[bool] = []
    sizes: list[int] = []
    for _ in range(12):
        spool.append([group], [], now=0.0)
        frame = spool.next()
        assert frame is not None
        kept.append(spool.quarantine(frame.seq, "status 422: no"))
        sizes.append((spool.folder / "quarantine").stat().st_size)
    assert 3 < sum(kept) < 12
    assert kept == sorted(kept, reverse=True), "one was told as set aside that is not there"
    assert sizes[-1] == sizes[sum(kept) - 1] <= 16 * 2**20
    assert sizes[-1] + sizes[0] > 16 * 2**20
    assert spool.next() is None


def test_each_frame_that_was_refused_can_be_read_in_the_quarantine_with_its_reason(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    for first, reason in ((0, "no"), (3, "nor this")):
        spool.append(rows(first), [], now=0.0)
        frame = spool.next()
        assert frame is not None
        assert spool.quarantine(frame.seq, reason)
    found = [
        payload for _, kind, payload in segments.records((spool.folder / "quarantine").read_bytes()) if kind == b"R"
    ]
    assert [msgspec.msgpack.decode(payload)["reason"] for payload in found] == ["no", "nor this"]


# ---- A16: corruption


def sample_spool(folder: Path, ticks: int = 4) -> Path:
    spool = Spool(folder, header(folder.name))
    for tick in range(ticks):
        spool.append(rows(3 * tick), [], now=0.0)
    crash(spool)
    (path,) = folder.glob("*.ticks")
    return path


@pytest.mark.fault
def test_a17_a_source_that_its_owner_deletes_while_it_is_opened_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    sample_spool(folder)
    lock = segments.Segments.lock

    def deleted_meanwhile(files: segments.Segments) -> None:
        for path in folder.iterdir():
            path.unlink()
        lock(files)  # makes the file again, so that the owner cannot delete the folder any more

    monkeypatch.setattr(segments.Segments, "lock", deleted_meanwhile)
    with pytest.raises(FileNotFoundError, match="any more"):
        Spool.open(folder)
    assert not folder.exists()


@pytest.mark.fault
def test_a17_a_folder_that_a_process_just_makes_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no samples"):
        Spool.open(tmp_path / "s")
    assert list((tmp_path / "s").iterdir()) == []


@pytest.mark.fault
def test_a16_truncated_at_every_offset_the_whole_records_before_are_read(tmp_path: Path) -> None:
    original = sample_spool(tmp_path / "whole").read_bytes()
    offsets = [offset for offset, kind, _ in segments.records(original) if kind == segments.TICK]
    ends = [*offsets[1:], len(original)]
    for cut in range(len(original)):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "00000001.ticks").write_bytes(original[:cut])
        spool = Spool.open(folder)
        assert (folder / "00000001.ticks").stat().st_size == cut - spool.counters["torn_bytes"]
        whole = sum(end <= cut for end in ends)
        assert steps_of(*drain(spool)) == list(range(3 * whole)), cut
        assert spool.counters["corrupt"] == 0
        spool.abandon()


@pytest.mark.fault
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=5),
    data=st.data(),
)
def test_a16_flipped_bits_never_stop_the_start_and_never_invent_samples(
    tmp_path: Path, flips: list[tuple[float, int]], data: st.DataObject
) -> None:
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    path = sample_spool(folder)
    content = bytearray(path.read_bytes())
    places = sorted(int(place * len(content)) for place, _ in flips)
    for (_, bit), place in zip(flips, places, strict=True):
        content[place] ^= 1 << bit
    path.write_bytes(content)
    spool = Spool.open(folder)
    found = steps_of(*drain(spool))
    assert found == list(range(len(found)))
    whole = [
        offset + segments.FRAMING.size + len(payload)
        for offset, kind, payload in segments.records(bytes(content))
        if kind == b"T"
    ]
    assert len(found) == 3 * len(whole)
    spool.abandon()


@pytest.mark.fault
def test_a16_a_broken_middle_is_kept_as_corrupt_and_what_is_before_it_survives_a_second_start(tmp_path: Path) -> None:
    path = sample_spool(tmp_path / "s")
    content = bytearray(path.read_bytes())
    third = [offset for offset, kind, _ in segments.records(bytes(content)) if kind == b"T"][2]
    content[third + 20] ^= 1
    path.write_bytes(content)
    first = Spool.open(tmp_path / "s")
    assert first.counters["corrupt"] == 1
    crash(first)
    second = Spool.open(tmp_path / "s")
    assert steps_of(*drain(second)) == list(range(6))
    assert [p.name for p in (tmp_path / "s").glob("*.corrupt")] == ["00000001.ticks.corrupt"]


def test_a_damaged_digit_is_no_later_version(tmp_path: Path) -> None:
    path = sample_spool(tmp_path / "s")
    path.write_bytes(path.read_bytes().replace(segments.MAGIC, b"perfagent spool 5\n"))
    assert Spool.open(tmp_path / "s").counters["corrupt"] == 1
    assert [p.name for p in (tmp_path / "s").glob("*.corrupt")] == ["00000001.ticks.corrupt"]


def of_version_2() -> bytes:
    """The head of a file as a later version will write it."""
    payload = b"whatever its header will be"
    crc = zlib.crc32(payload, zlib.crc32(segments.HEADER, 2))
    return b"perfagent spool 2\n" + segments.FRAMING.pack(len(payload), crc, segments.HEADER) + payload


def test_a_spool_of_a_later_version_is_left_as_it_is(tmp_path: Path) -> None:
    path = sample_spool(tmp_path / "s")
    later = of_version_2()
    path.write_bytes(later)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        SpoolVersionError, match=r"00000001.ticks is of version 2 .* reads up to 1: .* upgrade perfagent"
    ):
        Spool.open(tmp_path / "s")
    assert sorted(tmp_path.rglob("*")) == before
    assert path.read_bytes() == later


@pytest.mark.fault
def test_a16_both_state_slots_broken_still_sends_everything_once(tmp_path: Path) -> None:
    sample_spool(tmp_path / "s")
    (tmp_path / "s" / "state").write_bytes(os.urandom(128))
    assert steps_of(*drain(Spool.open(tmp_path / "s"))) == list(range(12))


# ---- A17: two processes


@pytest.mark.fault
def test_a17_a_spool_in_use_is_left_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    with pytest.raises(SpoolBusyError):
        Spool.open(tmp_path / "s")
    spool.close()
    assert steps_of(*drain(Spool.open(tmp_path / "s"))) == [0, 1, 2]


@pytest.mark.fault
@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_a17_a_lock_that_somebody_takes_away_is_held_again_and_all_arrives_once(tmp_path: Path, how: str) -> None:
    """As a cleaner does, for which the lock is an old file beside young ones."""
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    lock = spool.folder / "lock"
    said = lock.read_text()
    lock.unlink()
    if how == "replaced":
        lock.write_text("somebody else's")
    spool.files._look_at = 0.0  # it looks once a second
    spool.append(rows(3), [], now=1.0)
    spool.append(rows(6), [], now=2.0)
    assert lock.read_text() == said
    with pytest.raises(SpoolBusyError):
        Spool.open(spool.folder)
    found = drain(spool)
    crash(spool)
    found += drain(Spool.open(spool.folder))
    assert steps_of(*found) == list(range(9))


@pytest.mark.fault
def test_a17_what_a_lock_says_is_whole_where_it_said_more_before(tmp_path: Path) -> None:
    """The watcher finds the trainer's folders by it (launch/watcher.py)."""
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "lock").write_text("4194304 99999999999 and more")
    spool = Spool(tmp_path / "s", header())
    spool.header.pid, spool.header.pid_start = 7, 8
    assert spool.create()
    assert (tmp_path / "s" / "lock").read_text() == "7 8"
    spool.abandon()


@pytest.mark.fault
def test_a17_of_eight_processes_exactly_one_takes_an_orphan(tmp_path: Path) -> None:
    sample_spool(tmp_path / "s")
    code = (
        "import sys; from pathlib import Path; from perfagent.delivery.spool import *\n"
        "sys.stdin.readline()\n"
        "try:\n    s = Spool.open(Path(sys.argv[1])); print('mine', flush=True)\n"
        "except SpoolBusyError: print('busy', flush=True)\n"
        "sys.stdin.readline()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "s")]
    children = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    said = [child.stdout.readline().strip() for child in children if child.stdout]
    for child in children:
        child.communicate("\n", timeout=20)
    assert sorted(said) == ["busy"] * 7 + ["mine"]


# ---- A15: no disk


def test_a_folder_that_cannot_be_made_keeps_everything_in_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    spool = Spool(tmp_path / "file" / "s", header())
    assert not spool.append(rows(0), [event()], now=0.0)
    assert spool.error is not None
    assert spool.error.errno == errno.ENOTDIR
    (frame,) = drain(spool)
    assert steps_of(frame) == [0, 1, 2]


class FullDisk:
    """os.write and os.pwrite of a disk with so many bytes left; -1: as many as one likes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self._write, self._pwrite = os.write, os.pwrite
        monkeypatch.setattr(os, "write", self.write)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self.left < 0:
            return self._write(fd, data)
        if self.left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self._write(fd, bytes(data)[: self.left])
        self.left -= written
        return written


@pytest.mark.fault
def test_a15_a_short_write_is_cut_back_and_later_records_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    spool = Spool(tmp_path / "s", header())
    assert spool.append(rows(0), [], now=0.0)
    disk.left = 25
    assert not spool.append(rows(3), [], now=0.0)
    assert spool.error is not None
    assert spool.error.errno == errno.ENOSPC
    (path,) = spool.folder.glob("*.ticks")
    assert path.stat().st_size == spool.on_disk, "a part of the record stayed"
    disk.left = -1
    spool.files.retry_at = 0.0
    assert spool.append(rows(6), [], now=0.0)
    crash(spool)
    assert steps_of(*drain(Spool.open(tmp_path / "s"))) == [0, 1, 2, 6, 7, 8]


@pytest.mark.fault
def test_a15_memory_is_bounded_while_the_disk_is_full_and_events_outlive_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    spool = Spool(tmp_path / "s", header(), max_memory_bytes=200_000)
    disk.left = 0
    noise = random.Random(0)
    for tick in range(40):
        column = [noise.random() for _ in range(2000)]
        spool.append(
            [Group(step=list(range(2000)), time=column, monotonic=column, values={"x": column})],
            [event(str(tick))],
            now=0.0,
        )
        spool.files.retry_at = 0.0
        spool.hold(now=1e9)
    assert 0 < spool.in_memory <= 200_000
    assert spool.counters["dropped"] > 0
    assert spool.counters["dropped_events"] == 0
    disk.left = -1
    spool.files.retry_at = 0.0
    spool.hold(now=1e9)  # space is back: what was in memory goes to the disk
    assert spool.in_memory == 0
    frames = drain(spool)
    assert [e.data["title"] for frame in frames for e in frame.events] == [str(tick) for tick in range(40)]
    assert len(steps_of(*frames)) + spool.counters["dropped"] == 80_000


@pytest.mark.fault
def test_a15_the_frame_on_its_way_is_kept_in_memory_whatever_else_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count as dropped, and be stored."""
    disk = FullDisk(monkeypatch)
    spool = Spool(tmp_path / "s", header(), max_memory_bytes=100_000)
    disk.left = 0
    noise = random.Random(0)
    for tick in range(8):
        column = [noise.random() for _ in range(2000)]
        group = Group(
            step=[*range(2000 * tick, 2000 * tick + 2000)], time=column, monotonic=column, values={"x": column}
        )
        spool.append([group], [event("".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=40_000)))], now=0.0)
        spool.files.retry_at = 0.0
        spool.hold(now=1e9)
        if not tick:
            sent = spool.next()
            assert sent is not None
    assert spool.counters["dropped_events"] > 0
    assert spool.next() is sent
    frames = drain(spool)
    assert steps_of(*frames)[:2000] == [*range(2000)]
    assert len(steps_of(*frames)) + spool.counters["dropped"] == 16_000
    assert sum(len(frame.events) for frame in frames) + spool.counters["dropped_events"] == 8
    assert spool.in_memory == 0


@pytest.mark.fault
def test_a15_too_many_open_files_is_survived(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        assert not spool.append(rows(0), [], now=0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    spool.files.retry_at = 0.0
    assert spool.append(rows(3), [], now=0.0)
    assert steps_of(*drain(spool)) == [0, 1, 2, 3, 4, 5]


@pytest.mark.fault
def test_a15_a_mark_that_cannot_be_written_takes_its_ticks_off_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    frame = spool.next()
    assert frame is not None
    crash(spool)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):  # else the successor would send them a second time, under another number
        Spool.open(tmp_path / "s")


@pytest.mark.fault
@pytest.mark.parametrize("disk", ["is better", "stays as it is"])
def test_a15_what_was_taken_off_the_disk_with_its_mark_is_on_it_again_at_the_end_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    spool = Spool(tmp_path / "s", header())
    assert spool.append(rows(0), [event()], now=0.0)

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwrite", fails)
    frame = spool.next()
    assert frame is not None
    if disk == "is better":
        monkeypatch.undo()
        spool.close(final="finished")
        (left,) = drain(Spool.open(tmp_path / "s"))
        assert (left.seq, steps_of(left), len(left.events)) == (frame.seq, [0, 1, 2], 1)
    else:
        monkeypatch.setattr(os, "write", fails)
        spool.close(final="finished")
        assert (spool.counters["dropped"], spool.counters["dropped_events"]) == (3, 1)


@pytest.mark.fault
@pytest.mark.parametrize("then", ["goes on", "ends"])
def test_a15_a_mark_that_a_failing_disk_did_not_take_is_written_once_it_is_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """A disk that was read-only for a moment lets go of no ticks either."""
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)

    def fails(*_: object, **__: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as failing:
        for call in ("pwrite", "unlink"):
            failing.setattr(os, call, fails)
        frame = spool.next()
        assert frame is not None
        spool.ack(frame.seq)
    assert steps_of(frame) == [0, 1, 2]
    spool.files.retry_at = 0.0
    if then == "goes on":
        assert spool.append(rows(3), [], now=1.0)
        crash(spool)
    else:
        spool.close()
    left = drain(Spool.open(tmp_path / "s"))
    assert steps_of(*left) == ([3, 4, 5] if then == "goes on" else [])


# ---- A05: a long outage


@pytest.mark.fault
def test_a05_a_day_at_100_points_a_second_fits_in_64_megabytes(tmp_path: Path) -> None:
    """One hour is written and multiplied: ten series at ten steps a second, random walks in float32 as training gives
    them."""
    spool = Spool(tmp_path / "s", header())
    names = ["loss", "grad/norm", "lr", "step_time_s", *(f"phase/{n}_s" for n in range(6))]
    noise = random.Random(0)
    state = [1.0] * 10
    rss_before = resident()
    for minute in range(60):
        for tick in range(30):  # of two seconds, to save time: a minute's frame is the same
            steps = list(range(600 * minute + 20 * tick, 600 * minute + 20 * tick + 20))
            times = [1.7e9 + 0.1 * s + noise.random() * 1e-3 for s in steps]
            monotonics = [t - 1.6e9 for t in times]
            columns: dict[str, bytes] = {}
            for n, name in enumerate(names):
                walk = []
                for _ in steps:
                    state[n] += noise.gauss(0, 0.01)
                    walk.append(float(struct.unpack("<f", struct.pack("<f", state[n]))[0]))
                columns[name] = pack(walk)
            spool.append([Group(step=steps, time=times, monotonic=monotonics, values=columns)], [], now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
    assert 24 * spool.on_disk <= 64 * 2**20
    assert resident() - rss_before <= 32 * 2**20
    frames = drain(spool)
    assert sum(frame.samples for frame in frames) == 360_000
    assert spool.counters["dropped"] == 0


SHAPES = {"ten series of noise": (10, 10, False), "one series": (1, 100, True)}


@pytest.mark.fault
@pytest.mark.parametrize("shape", SHAPES)
def test_a05_a_day_of_what_users_log_fits_in_64_megabytes(tmp_path: Path, shape: str) -> None:
    """Twelve minutes, multiplied. Noise in float64 has 54 random bits a number; a series by itself has a clock a
    number."""
    series, a_second, narrow = SHAPES[shape]
    spool = Spool(tmp_path / "s", header())
    noise = random.Random(1)
    begin = round(6e4 * 1e9)
    for minute in range(12):
        steps = range(60 * a_second * minute, 60 * a_second * (minute + 1))
        monotonics = [(begin + step * 10**9 // a_second + noise.randrange(10**6)) / 1e9 for step in steps]
        columns: dict[str, bytes] = {}
        for n in range(series):
            values = [noise.gauss(0, 1) for _ in steps]
            narrowed = struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))
            columns[f"metric/{n}"] = struct.pack(f"<{len(values)}d", *(narrowed if narrow else values))
        times = [1.79e9 + monotonic for monotonic in monotonics]
        spool.append([Group(step=list(steps), time=times, monotonic=monotonics, values=columns)], [], now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
    assert 120 * spool.on_disk <= 64 * 2**20
    assert sum(frame.samples for frame in drain(spool)) == 72_000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.fault
def test_a05_over_the_cap_samples_are_thinned_and_events_and_nan_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100_000)
    spool = Spool(tmp_path / "s", header(), max_bytes=1_000_000)
    noise = random.Random(0)
    nan_steps = []
    extremes = []
    for minute in range(40):
        first = 2000 * minute
        values = [noise.random() for _ in range(2000)]
        values[17] = math.nan
        values[555] = 1e6
        nan_steps.append(first + 17)
        extremes.append(first + 555)
        steps = list(range(first, first + 2000))
        times = [1e9 + noise.random() for _ in steps]
        group = Group(step=steps, time=times, monotonic=times, values={"loss": pack(values)})
        spool.append([group], [event(str(minute))], now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
        assert spool.on_disk <= 1_000_000
    assert spool.counters["thinned"] > 0
    assert spool.counters["dropped_events"] == 0
    frames = drain(spool)
    kept = set(steps_of(*frames))
    assert kept.issuperset(nan_steps)
    assert kept.issuperset(extremes)
    assert len(kept) + spool.counters["thinned"] + spool.counters["dropped"] == 80_000
    assert [e.data["title"] for frame in frames for e in frame.events] == [str(minute) for minute in range(40)]
    assert steps_of(frames[-1]) == list(range(78_000, 80_000))  # the newest stay whole


@pytest.mark.fault
def test_a05_events_go_last_and_each_that_goes_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 4000)
    spool = Spool(tmp_path / "s", header(), max_bytes=40_000)
    noise = random.Random(0)
    for number in range(100):
        values = [noise.random() for _ in range(16)]
        group = Group(step=list(range(16)), time=values, monotonic=values, values={"loss": pack(values)})
        spool.append([group], [event("".join(noise.choices("abcdefghijklmnopqrstuvwxyz", k=1000)))], now=0.0)
        spool.hold(now=0.0, force=True)
        if spool.counters["dropped_events"]:
            assert number > 20
            assert spool.counters["dropped"] > 0, "an event went before a plain sample"
    assert spool.counters["dropped_events"] > 0
    frames = drain(spool)
    assert sum(len(frame.events) for frame in frames) + spool.counters["dropped_events"] == 100
    assert sum(frame.samples for frame in frames) + spool.counters["thinned"] + spool.counters["dropped"] == 1600


@pytest.mark.fault
def test_a05_a_frame_that_was_sent_before_keeps_its_content_when_all_else_is_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may have it: another content under its number would be dropped as the second copy."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100_000)
    spool = Spool(tmp_path / "s", header(), max_bytes=200_000)
    noise = random.Random(0)
    for minute in range(20):
        values = [noise.random() for _ in range(2000)]
        group = Group(step=list(range(2000)), time=values, monotonic=values, values={"loss": pack(values)})
        spool.append([group], [], now=0.0)
        spool.hold(now=0.0, force=True)
        if not minute:
            sent = spool.next()
    again = Spool.open(_copy(spool, tmp_path / "again")).next()
    assert again is not None
    assert sent is not None
    assert (again.seq, again.groups) == (sent.seq, sent.groups)
    assert spool.counters["thinned"] > 0


@pytest.mark.fault
def test_a05_halves_of_a_frame_that_is_thinned_are_both_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They stood in one record, and stand in one each then."""
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 10_000)
    spool = Spool(tmp_path / "s", header(), max_bytes=120_000)
    noise = random.Random(0)
    for number in range(12):
        values = [noise.random() for _ in range(1000)]
        steps = list(range(1000 * number, 1000 * number + 1000))
        spool.append(
            [Group(step=steps, time=values, monotonic=values, values={"loss": pack(values)})], [event()], now=0.0
        )
        if not number:
            frame = spool.next()
            assert frame is not None
            assert spool.split(frame.seq)
        spool.hold(now=0.0, force=True)
    assert spool.counters["thinned"] > 0
    frames = drain(spool)
    assert (spool.counters["dropped"], spool.counters["dropped_events"]) == (0, 0)
    assert len(steps_of(*frames)) + spool.counters["thinned"] == 12_000
    assert sum(len(frame.events) for frame in frames) == 12


def _copy(spool: Spool, folder: Path) -> Path:
    shutil.copytree(spool.folder, folder)
    return folder


def test_a_state_whose_number_is_somebody_elses_by_now_is_written_where_it_belongs(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    frame = spool.next()
    assert frame is not None
    assert spool.files._state is not None
    number = spool.files._state.fd
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"x" * 200)
    with checkpoint.open("r+b") as file:
        os.dup2(file.fileno(), number)  # as after a script's os.closerange
    try:
        spool.ack(frame.seq)
        assert checkpoint.read_bytes() == b"x" * 200
    finally:
        os.close(number)
    spool.append(rows(3), [], now=0.0)
    crash(spool)
    assert steps_of(*drain(Spool.open(tmp_path / "s"))) == [3, 4, 5]


# ---- finding what others left


@pytest.mark.fault
def test_a15_a_folder_that_somebody_deletes_is_made_again_and_holds_all_that_waits(tmp_path: Path) -> None:
    """A cleaner of temporary folders, or a user: what is written to a deleted file is gone with the process."""
    spool = Spool(tmp_path / "state" / "s", header())
    spool.append(rows(0), [], now=0.0)
    sent = spool.next()
    assert sent is not None
    spool.append(rows(3), [], now=0.0)
    shutil.rmtree(tmp_path / "state")
    assert not spool.append(rows(6), [], now=0.0), "it was not told that the files are gone"
    assert isinstance(spool.error, FileNotFoundError)
    assert spool.append(rows(9), [], now=0.0), "no second folder was made"
    spool.hold(now=0.0)
    assert stat.S_IMODE((tmp_path / "state" / "s").stat().st_mode) == 0o700
    crash(spool)
    again = Spool.open(tmp_path / "state" / "s")
    frames = drain(again)
    assert frames[0].seq == sent.seq
    assert steps_of(*frames) == [*range(12)]


@pytest.mark.fault
@pytest.mark.parametrize("by_hold", [True, False])
def test_a15_of_a_backlog_that_somebody_deletes_what_is_on_its_way_is_kept_and_the_rest_is_counted(
    tmp_path: Path, *, by_hold: bool
) -> None:
    """Nobody may ask for those frames before the process ends."""
    spool = Spool(tmp_path / "state" / "s", header())
    spool.append(rows(0), [], now=0.0)
    sent = spool.next()
    assert sent is not None
    spool.hold(now=0.0, force=True)
    for first in (3, 6):
        spool.append(rows(first), [event()], now=0.0)
        spool.hold(now=0.0, force=True)
    shutil.rmtree(tmp_path / "state")
    spool.append(rows(9), [], now=0.0)
    if by_hold:
        spool.hold(now=0.0)
        assert (spool.counters["dropped"], spool.counters["dropped_events"]) == (6, 2)
    spool.close()
    assert (spool.counters["dropped"], spool.counters["dropped_events"]) == (6, 2)
    frames = drain(Spool.open(tmp_path / "state" / "s"))
    assert frames[0].seq == sent.seq
    assert steps_of(*frames) == [0, 1, 2, 9, 10, 11]


@pytest.mark.fault
def test_a15_a_folder_that_was_moved_away_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SEGMENT_BYTES", 100)
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    (tmp_path / "s").rename(tmp_path / "elsewhere")
    spool.append(rows(3), [], now=0.0)
    assert spool.append(rows(6), [], now=0.0)
    spool.hold(now=0.0)
    crash(spool)
    assert steps_of(*drain(Spool.open(tmp_path / "s"))) == [*range(9)]


def test_only_young_folders_with_samples_are_found(tmp_path: Path) -> None:
    sample_spool(tmp_path / "old")
    sample_spool(tmp_path / "young")
    (tmp_path / "empty").mkdir()
    week = time.time() - 8 * 86400
    for path in (*(tmp_path / "old").iterdir(), tmp_path / "old"):
        os.utime(path, (week, week))
    assert [folder.name for folder in folders(tmp_path, max_age_s=7 * 86400)] == ["young"]
    assert {folder.name for folder in folders(tmp_path)} == {"old", "young"}
    assert folders(tmp_path / "missing") == []
    os.utime(tmp_path / "young", (week, week))  # a folder is as old as the last file that was made in it
    assert [folder.name for folder in folders(tmp_path, max_age_s=7 * 86400)] == ["young"]


def test_a_recording_is_kept_after_it_was_sent_and_goes_to_another_server_under_the_same_numbers(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path / "s", header(), recording=True)
    for minute in range(3):
        spool.append(rows(3 * minute), [], now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
    spool.append(rows(9), [], now=200.0)
    spool.close(final="finished")
    first = Spool.open(tmp_path / "s", recording=True)
    sent = drain(first)
    assert steps_of(*sent) == list(range(12))
    first.close()
    assert list((tmp_path / "s").glob("*.frames"))
    second = Spool.open(tmp_path / "s", recording=True)
    again = {frame.seq: frame for frame in drain(second)}
    assert again == {frame.seq: frame for frame in sent}, (
        "the ledger of a server that has them drops them by their numbers"
    )


def test_what_was_refused_is_set_aside_once_however_often_a_recording_is_sent(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header(), recording=True)
    spool.append(rows(0), [], now=0.0)
    spool.hold(now=61.0)
    spool.close(final="finished")
    sizes = set()
    for _ in range(2):
        again = Spool.open(tmp_path / "s", recording=True)
        frame = again.next()
        assert frame is not None
        assert again.quarantine(frame.seq, "status 422: no")
        again.close()
        sizes.add((tmp_path / "s" / "quarantine").stat().st_size)
    assert len(sizes) == 1


def test_a_draft_that_was_being_written_is_a_torn_end_and_no_damage(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    spool.append(rows(0), [], now=0.0)
    spool.draft(Draft([], [[1, 1.0, 1.0, ["a"], [2.0]]], []), now=0.0)
    crash(spool)
    (path,) = spool.folder.glob("*.ticks")
    path.write_bytes(path.read_bytes()[:-5])
    again = Spool.open(tmp_path / "s")
    assert again.counters["corrupt"] == 0
    assert again.counters["torn_bytes"] > 0
    assert steps_of(*drain(again)) == [0, 1, 2]


def test_a_file_that_the_disk_does_not_give_keeps_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = sample_spool(tmp_path / "s")
    read = Path.read_bytes

    def fails(this: Path) -> bytes:
        if this == path:
            raise OSError(errno.EIO, "Input/output error")
        return read(this)

    monkeypatch.setattr(Path, "read_bytes", fails)
    spool = Spool.open(tmp_path / "s")
    assert spool.counters["unreadable"] == 1
    spool.remove()
    assert path.exists()
