from __future__ import annotations

import errno
import math
import os
import random
import shutil
import stat
import struct
import zlib
from pathlib import Path

import msgspec
import pytest
from clocks import Clock
from faults import loops
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ticks import tick_of

from perfagent.delivery import records
from perfagent.delivery.records import SpoolVersionError
from perfagent.delivery.spool import Header, Outgoing, Spool, SpoolBusyError
from perfagent.wire import Event, Group

pytestmark = pytest.mark.fault


def header(source: str = "s") -> Header:
    return Header(source=source, project="p", rank=0, server="http://127.0.0.1:1", run="r", attempt=1)


def rows(first: int, count: int = 3) -> list[Group]:
    steps = list(range(first, first + count))
    times = [1e9 + step for step in steps]
    return [Group(step=steps, time=times, monotonic=times, values={"loss": [1.0 / (1 + s) for s in steps]})]


def noisy(chance: random.Random, steps: range) -> list[Group]:
    """Rows that hardly get smaller."""
    values = [chance.random() for _ in steps]
    return [Group(step=list(steps), time=values, monotonic=values, values={"loss": values})]


def event(text: str = "x") -> Event:
    return Event(kind="alert", time=1.0, data={"title": text})


def letters(chance: random.Random, count: int) -> str:
    return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=count))


def steps_of(*frames: Outgoing) -> list[int]:
    return [step for frame in frames for group in frame.groups for step in group.steps()]


def sent(spool: Spool) -> Outgoing:
    """The frame that is on its way."""
    found = spool.next()
    assert found is not None
    return found


def drain(spool: Spool) -> list[Outgoing]:
    found = []
    while (outgoing := spool.next()) is not None:
        found.append(outgoing)
        spool.ack(outgoing.seq)
    return found


def crash(spool: Spool) -> None:
    """What kill -9 leaves: the files as they are, the lock free."""
    spool.abandon()


def test_x11_folder_and_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        spool = Spool(tmp_path / "state" / "spool" / "s", header())
        spool.append(*tick_of(rows(0)), now=0.0)
        spool.hold(now=1e9, force=True)
        spool.append(*tick_of(rows(3)), now=0.0)
    finally:
        os.umask(before)
    made = [tmp_path / "state", *(tmp_path / "state").rglob("*")]
    assert {path.suffix for path in made} >= {".ticks", ".frames"}
    assert {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in made} == {(True, 0o700), (False, 0o600)}


def test_a08_refused_frames_are_kept_with_reasons_to_a_limit(tmp_path: Path) -> None:
    limit = 12_000
    spool = Spool(tmp_path / "s", header(), max_quarantine_bytes=limit)
    noise, kept, sizes = random.Random(0), [], []
    for number in range(8):
        spool.append(*tick_of(noisy(noise, range(200))), now=0.0)
        kept.append(spool.quarantine(sent(spool).seq, f"no {number}"))
        content = (spool.folder / "quarantine").read_bytes()
        sizes.append(len(content))
    assert 3 < sum(kept) < 8
    assert kept == sorted(kept, reverse=True), "one was told as set aside that is not there"
    assert sizes[-1] == sizes[sum(kept) - 1] <= limit < sizes[-1] + sizes[0]
    reasons = [
        msgspec.msgpack.decode(payload)["reason"] for _, kind, payload in records.records_in(content) if kind == b"R"
    ]
    assert reasons == [f"no {number}" for number in range(sum(kept))]
    assert spool.next() is None


# ---- A16: damage


def sample_spool(folder: Path) -> Path:
    """Four ticks of three rows; their file."""
    spool = Spool(folder, header(folder.name))
    for tick in range(4):
        spool.append(*tick_of(rows(3 * tick)), now=0.0)
    crash(spool)
    (path,) = folder.glob("*.ticks")
    return path


def whole_records(content: bytes) -> list[int]:
    """Where the ticks and frames end that are whole before any damage."""
    kinds = (records.TICK, records.FRAME)
    return [o + records.FRAMING.size + len(p) for o, kind, p in records.records_in(content) if kind in kinds]


@pytest.mark.parametrize("kind", ["ticks", "frames"])
def test_a16_cut_anywhere_what_is_whole_before_is_read(tmp_path: Path, kind: str) -> None:
    original = loops.damaged(tmp_path / "whole", kind).read_bytes()
    ends = whole_records(original)
    assert len(ends) == 4
    near = {end + by for end in (0, *ends) for by in range(-9, 10)}
    for cut in sorted({cut for cut in near if 0 <= cut <= len(original)} | {*range(0, len(original), 11)}):
        file = tmp_path / f"cut{cut}" / f"00000001.{kind}"
        file.parent.mkdir()
        file.write_bytes(original[:cut])
        spool = Spool.open(file.parent)
        assert steps_of(*drain(spool)) == list(range(3 * sum(end <= cut for end in ends))), cut
        assert spool.counters["corrupt"] == 0
        spool.abandon()


@pytest.mark.parametrize("kind", ["ticks", "frames"])
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@example(flips=[(0.263671875, 0)], state=[])  # the length of the first frame: as if its end was never written
@example(flips=[(0.25, 0), (0.022206455867320507, 0)], state=[])  # the number of the version, and the first record
@given(
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4),
    state=st.lists(st.tuples(st.integers(0, 127), st.integers(0, 7)), max_size=4),
)
def test_a16_flipped_bits_stop_no_start_and_invent_nothing(tmp_path, kind, flips, state):
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    path = loops.damaged(folder, kind)
    content, slots = bytearray(path.read_bytes()), bytearray((folder / "state").read_bytes())
    for place, bit in flips:
        content[int(place * len(content))] ^= 1 << bit
    for place, bit in state:
        slots[place] ^= 1 << bit
    path.write_bytes(content)
    (folder / "state").write_bytes(slots)
    whole = whole_records(bytes(content))
    found = loops.steps_in(folder)
    Spool.open(folder).abandon()
    assert found == loops.steps_in(folder) == list(range(3 * len(whole))), "the second start finds less"
    if len(whole) < 4 and not records.torn(bytes(content), 0):
        ends = [o + records.FRAMING.size + len(p) for o, _, p in records.records_in(bytes(content))]
        begin = ends[-1] if ends else len(records.MAGIC) if content.startswith(records.MAGIC) else 0
        assert Spool.open(folder).counters["corrupt"] or records.torn(bytes(content), begin)


def of_version(version: int) -> bytes:
    """The head of a file as another version writes it."""
    payload = b"whatever its header is"
    crc = zlib.crc32(payload, zlib.crc32(records.HEADER, version if version > 1 else 0))
    return b"perfagent spool %d\n" % version + records.FRAMING.pack(len(payload), crc, records.HEADER) + payload


@pytest.mark.parametrize("version", [1, 2, 3])
def test_spool_of_another_version_is_left_as_it_is(tmp_path: Path, version: int) -> None:
    path = sample_spool(tmp_path / "damaged digit")
    path.write_bytes(path.read_bytes().replace(records.MAGIC, b"perfagent spool 5\n"))
    assert Spool.open(path.parent).counters["corrupt"] == 1
    path = sample_spool(tmp_path / "s")
    path.write_bytes(of_version(version))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SpoolVersionError, match=rf"00000001.ticks is of version {version} .* reads version 4"):
        Spool.open(tmp_path / "s")
    assert sorted(tmp_path.rglob("*")) == before
    assert path.read_bytes() == of_version(version)


# ---- A17: two processes. A15: the disk


@pytest.mark.parametrize("how", ["folder deleted", "folder moved", "lock deleted", "lock replaced"])
def test_a15_a17_what_somebody_deletes_is_made_again(tmp_path: Path, how: str) -> None:
    """A cleaner of temporary folders, or a user: what is written to a deleted file is gone with the process."""
    clock = Clock(1000.0)
    spool = Spool(
        tmp_path / "state" / "s", header(), clock=clock, segment_bytes=100 if how == "folder moved" else 2**23
    )
    spool.append(*tick_of(rows(0)), now=0.0)
    first, said = sent(spool), (lock := spool.folder / "lock").read_text()
    spool.append(*tick_of(rows(3)), now=0.0)
    if how == "folder deleted":
        shutil.rmtree(tmp_path / "state")
    elif how == "folder moved":
        (tmp_path / "state").rename(tmp_path / "elsewhere")
    else:
        lock.unlink()
    if how == "lock replaced":
        lock.write_text("somebody else's")
    clock.at += 1.0  # it looks once a second
    assert not spool.append(*tick_of(rows(6)), now=0.0), "it was not told that the files are gone"
    assert isinstance(spool.error, FileNotFoundError)
    assert spool.append(*tick_of(rows(9)), now=0.0), "they were not made again"
    assert lock.read_text() == said
    with pytest.raises(SpoolBusyError):
        Spool.open(spool.folder)
    spool.hold(now=0.0)
    assert stat.S_IMODE(spool.folder.stat().st_mode) == 0o700
    crash(spool)
    frames = drain(Spool.open(spool.folder))
    assert frames[0].seq == first.seq
    assert steps_of(*frames) == [*range(12)]


def test_a15_minutes_of_an_outage_that_were_deleted_are_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header())
    for minute in range(2):
        spool.append(*tick_of(rows(3 * minute), [event()]), now=0.0)
        spool.hold(now=0.0, force=True)
    for path in spool.folder.glob("*.frames"):
        path.unlink()
    assert spool.next() is None
    assert (spool.counters["dropped"], spool.counters["dropped_events"]) == (6, 2)


def fails(*_: object, **__: object) -> int:
    raise OSError(errno.EIO, "Input/output error")


def test_a15_memory_is_bounded_and_events_outlive_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, noise = Clock(1000.0), random.Random(0)
    spool = Spool(tmp_path / "s", header(), max_memory_bytes=200_000, clock=clock)
    with monkeypatch.context() as full:
        full.setattr(os, "write", fails)
        for tick in range(40):
            spool.append(*tick_of(noisy(noise, range(2000)), [event(str(tick))]), now=0.0)
            clock.at += 1.0
            spool.hold(now=1e9)
    assert 0 < spool.pending_bytes <= 200_000
    assert spool.counters["dropped"] > 0
    clock.at += 1.0
    assert spool.append(*tick_of([]), now=0.0)
    spool.hold(now=2e9)  # space is back: what was in memory goes to the disk
    crash(spool)
    frames = drain(Spool.open(tmp_path / "s"))
    assert 4000 <= len(steps_of(*frames)) <= 8000, "the newest that have room stay"
    assert spool.counters["dropped_events"] == 0
    assert [e.data["title"] for frame in frames for e in frame.events] == [str(tick) for tick in range(40)]
    assert len(steps_of(*frames)) + spool.counters["dropped"] == 80_000


@pytest.mark.parametrize("then", ["killed", "the disk is better", "the disk stays as it is"])
def test_a15_ticks_whose_mark_cannot_be_written_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str) -> None:
    """Else the successor would send them a second time, under another number. At the end they are on the disk or
    counted."""
    spool = Spool(tmp_path / "s", header())
    assert spool.append(*tick_of(rows(0), [event()]), now=0.0)
    monkeypatch.setattr(os, "pwrite", fails)
    frame = sent(spool)
    if then == "killed":
        crash(spool)
        monkeypatch.undo()
        with pytest.raises(FileNotFoundError):
            Spool.open(tmp_path / "s")
    elif then == "the disk is better":
        monkeypatch.undo()
        spool.close(final="finished")
        (left,) = drain(Spool.open(tmp_path / "s"))
        assert (left.seq, steps_of(left), len(left.events)) == (frame.seq, [0, 1, 2], 1)
    else:
        monkeypatch.setattr(os, "write", fails)
        spool.close(final="finished")
        assert (spool.counters["dropped"], spool.counters["dropped_events"]) == (3, 1)


# ---- A05: a long outage


def test_a05_a_day_of_100_points_a_second_fits_in_64_megabytes(tmp_path: Path) -> None:
    """Six minutes, multiplied. Noise in float64 has 54 random bits a number."""
    spool = Spool(tmp_path / "s", header())
    noise = random.Random(1)
    for minute in range(6):
        steps = range(600 * minute, 600 * (minute + 1))
        monotonics = [(6 * 10**13 + step * 10**8 + noise.randrange(10**6)) / 1e9 for step in steps]
        columns = {f"metric/{n}": [noise.gauss(0, 1) for _ in steps] for n in range(10)}
        times = [1.79e9 + monotonic for monotonic in monotonics]
        spool.append(
            *tick_of([Group(step=list(steps), time=times, monotonic=monotonics, values=columns)]), now=60.0 * minute
        )
        spool.hold(now=60.0 * minute + 61)
    assert 240 * spool.on_disk <= 64 * 2**20
    assert sum(frame.samples for frame in drain(spool)) == 36_000
    assert spool.counters["dropped"] == 0


def test_a05_over_the_cap_old_samples_go_and_events_and_nan_stay(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header(), max_bytes=1_000_000, segment_bytes=100_000)
    noise = random.Random(0)
    for minute in range(40):
        first, bad = noisy(noise, range(2000 * minute, 2000 * minute + 2000)), rows(minute, 1)
        bad[0].values["loss"], bad[0].values["x"] = struct.pack("<d", math.nan), struct.pack("<d", 1.0)
        spool.append(*tick_of([*first, *bad], [event(str(minute))]), now=60.0 * minute)
        spool.hold(now=60.0 * minute + 61)
        assert spool.on_disk <= 1_000_000
    assert spool.counters["dropped"] > 0
    assert spool.counters["dropped_events"] == 0
    frames = drain(spool)
    assert sorted(int(e.data["title"]) for frame in frames for e in frame.events) == [*range(40)]
    assert sorted(s for f in frames for g in f.groups if "x" in g.values for s in g.steps()) == [*range(40)]
    assert sum(frame.samples for frame in frames) + spool.counters["dropped"] == 80_000 + 80
    assert {*range(78_000, 80_000)} <= {*steps_of(*frames)}, "the newest stay whole"


def test_a05_events_go_last_and_each_that_goes_is_counted(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "s", header(), max_bytes=40_000, segment_bytes=4000)
    noise = random.Random(0)
    for number in range(100):
        spool.append(*tick_of(noisy(noise, range(16)), [event(letters(noise, 1000))]), now=0.0)
        spool.hold(now=0.0, force=True)
        if spool.counters["dropped_events"]:
            assert number > 20
            assert spool.counters["dropped"] > 0, "an event went before a plain sample"
    assert spool.counters["dropped_events"] > 0
    frames = drain(spool)
    assert sum(len(frame.events) for frame in frames) + spool.counters["dropped_events"] == 100
    assert sum(frame.samples for frame in frames) + spool.counters["dropped"] == 1600
