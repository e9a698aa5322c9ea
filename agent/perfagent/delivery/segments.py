"""The files of one source's spool: CRC-framed records in segments that only grow, a lock, two slots of state.

    <root>/<source>/        0700, files 0600
      lock                  flock'ed by the process that owns the source; free means that its process is dead
      state                 two slots of 64 bytes, written in place (that needs no space on a full disk)
      00000001.ticks        what was drained every 150 ms, as it was noted
      00000002.frames       whole frames, compressed

A record is its payload's length, CRC-32 and kind, then the payload. What the kinds hold and when a file may go is
decided in spool.py and backlog.py. Here: a write happens whole or leaves no trace, a torn tail is distinguished from
damage, and an error of the disk is kept in `error` and never raised to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from perfagent.process.descriptors import Descriptor, opened

__all__ = [
    "BAD_RECORD",
    "DRAFT",
    "FRAME",
    "FRAMING",
    "HEADER",
    "MAGIC",
    "MAX_RECORD",
    "SEGMENT_BYTES",
    "TICK",
    "Header",
    "Segments",
    "SpoolBusyError",
    "SpoolVersionError",
    "State",
    "decode_header",
    "folders",
    "framed",
    "must_be_known",
    "number_of",
    "numbered",
    "owner",
    "records",
    "torn",
    "write_whole",
]

VERSION = 2
"""The CRC of a record begins with it. It was not so in version 1, which was never released and is not read."""
MAGIC = b"perfagent spool %d\n" % VERSION
_HEAD_BYTES = 2**16
_ANY_MAGIC = re.compile(rb"perfagent spool (\d{1,9})\n")
FRAMING = struct.Struct("<IIc")  # length of the payload, CRC-32 of kind and payload, kind
HEADER, TICK, DRAFT, FRAME = b"H", b"T", b"D", b"F"
MAX_RECORD = 64 * 2**20
SEGMENT_BYTES = 8 * 2**20
RETRY_S = 1.0
"""After an error of the disk nothing is tried for so long."""
LOOK_S = 1.0
"""So often it is looked whether the files are still there and ours that are not written to."""

_STATE = struct.Struct("<QQQQQI")  # generation, the fields of State, CRC-32 of the rest
_SLOT = 64


class SpoolBusyError(Exception):
    """Another process owns this source: its flock is held."""


class SpoolVersionError(OSError):
    """The files are of another version of the spool than this one reads; they are left as they are."""


class Header(msgspec.Struct, kw_only=True):
    """Whose samples these are: first record of every file, and again when the run's id becomes known."""

    source: str
    project: str
    rank: int
    server: str | None
    is_found: bool = False
    """Whether `server` is this user's own on this machine, which nobody named."""
    run: str | None = None
    attempt: int = 0
    name: str | None = None
    pid: int = 0
    pid_start: int = 0
    """Start of the process in clock ticks after boot (/proc/PID/stat): tells a recycled pid apart."""
    machine: str = ""
    """Where the pid holds (pids.machine)."""
    started: float = 0.0
    next_seq: int = 1
    """The number that the next frame gets."""
    next_tick: int = 1
    closed: str = ""
    """The last state, where the process wrote one before it ended."""
    followed: str | None = None
    """Folder of sources in which the process has its next one, where this one ended for it."""


class State(msgspec.Struct):
    """What must survive although it changes with every frame. marked: the frame sent last, which holds the ticks after
    `mark_from` up to `mark_upto`; acked: everything up to this frame is with the server."""

    acked: int = 0
    marked: int = 0
    mark_from: int = 0
    mark_upto: int = 0


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
BAD_RECORD = (msgspec.DecodeError, ValueError, RecursionError, zlib.error)


class _Growing(msgspec.Struct):
    """The file of one kind that is being written."""

    suffix: str
    file: Descriptor | None = None
    path: Path | None = None
    size: int = 0


class Segments:
    """The folder of one source. `kind` is "ticks" or "frames" throughout.

    error: why the last write failed, None once one succeeded. on_disk: bytes in the files. counters: shared with the
    spool. deleted: somebody has deleted files since it was last asked.
    """

    def __init__(
        self,
        folder: Path,
        header: Header,
        counters: Counter[str],
        *,
        segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.folder, self.header, self.counters = folder, header, counters
        self._segment_bytes, self._clock = segment_bytes, clock
        self.state = State()
        self.error: OSError | None = None
        self.on_disk = 0
        self.retry_at = 0.0
        self.ready = False
        self.deleted = False
        self.number = 0
        self.old_ticks: list[tuple[Path, int]] = []
        """Files of ticks that no longer grow, with the last tick in each."""
        self._generation = 0
        self._behind = False
        """Whether the state on the disk is an older one, since the disk did not take the last."""
        self._lock: Descriptor | None = None
        self._state: Descriptor | None = None
        self._look_at = 0.0
        self._growing = {kind: _Growing(kind) for kind in ("ticks", "frames")}

    # ---- opening and closing

    def create(self) -> bool:
        """Makes the folder and takes its lock. False (and `error`) when the disk does not allow it; try again later."""
        if self.ready:
            return True
        try:
            for missing in [p for p in (self.folder, *self.folder.parents) if not p.exists()][::-1]:
                missing.mkdir(mode=0o700, exist_ok=True)
            lock = self.lock()
            with contextlib.suppress(OSError):  # on a full disk the watcher finds nothing, and the next start delivers
                os.ftruncate(lock.fd, 0)
                os.pwrite(lock.fd, f"{self.header.pid} {self.header.pid_start}".encode("ascii"), 0)
            self._state = self.open_private("state", os.O_RDWR | os.O_CREAT)
            if os.fstat(self._state.fd).st_size < 2 * _SLOT:
                self.write_state()
            self.ready = True
        except BaseException as error:
            self.let_go()
            if not isinstance(error, OSError | SpoolBusyError):
                raise
            self.failed(error if isinstance(error, OSError) else OSError(errno.EBUSY, str(error)))
            return False
        return True

    def take_over(self) -> None:
        """After `lock()`: the state that a dead process left. Raises OSError."""
        self._state = self.open_private("state", os.O_RDWR | os.O_CREAT)
        self._read_state(self._state)
        self.ready = True

    def lock(self) -> Descriptor:
        """Raises SpoolBusyError while another process holds it, OSError for trouble of the disk."""
        self._lock = lock = self.open_private("lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.let_go()
            if isinstance(error, BlockingIOError):
                raise SpoolBusyError(f"{self.folder} belongs to a running process") from error
            raise
        return lock

    def open_private(self, name: str, flags: int) -> Descriptor:
        return opened(self.folder / name, flags)

    def close(self) -> None:
        """Closes the files and does nothing else; nothing is written afterwards."""
        self.let_go()
        self.retry_at = math.inf

    def let_go(self) -> None:
        """Closes the files; they may be opened again, and what grew is not written to any more."""
        for kind in self._growing:
            with contextlib.suppress(OSError):
                self.rotate(kind)
        for file in (self._state, self._lock):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._state = self._lock = None
        self.ready = False

    def forked(self) -> None:
        """In a forked child: closes the files, also one that the parent's threads had opened but not yet noted down,
        and those of the sources beside this one, which may be open to be sent."""
        self.close()
        mine = str(self.folder.parent) + os.sep
        with contextlib.suppress(OSError):
            for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are numbers
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}").startswith(mine):  # noqa: PTH115
                        os.close(int(name))

    def _is_there(self, file: Descriptor | None, now: float) -> bool:
        """False where somebody has deleted the files: what was in them is not on the disk, and the next write begins
        others. Where the script has closed every descriptor there was, all is let go of, to be opened anew.

        file: that is to be written; the others are looked at once a second (with cold caches 10 µs each)."""
        files = [file]
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            files = [self._lock, self._state, *(growing.file for growing in self._growing.values())]
        for one in files:
            deleted = one.is_deleted if one is not None else False
            if deleted:
                self._deleted(FileNotFoundError(errno.ENOENT, "its files were deleted"))
                return False
            if deleted is None:
                self.let_go()
                break
        return True

    def _deleted(self, error: FileNotFoundError) -> None:
        """The disk itself is well: nothing has to be waited for."""
        self.let_go()
        self.failed(error)
        self.deleted = True
        self.retry_at = 0.0
        self.on_disk = 0
        for path in numbered(self.folder, "ticks", "frames"):
            with contextlib.suppress(OSError):
                self.on_disk += path.stat().st_size

    # ---- writing

    def append(self, kind: str, record: bytes) -> int:
        """Appends one record; its offset + 1, or 0 when the disk did not take it all (then none of it stays)."""
        now, growing = self._clock(), self._growing[kind]
        if now < self.retry_at or not self._is_there(growing.file, now) or not self.create():
            return 0
        self.catch_up()
        try:
            if growing.file is not None and growing.size + len(record) > self._segment_bytes:
                self.rotate(kind)
            file = growing.file or self._new_file(growing)
            write_whole(file.fd, growing.size, record)
        except FileNotFoundError as error:
            self._deleted(error)
            return 0
        except OSError as error:
            self.failed(error)
            return 0
        self.error = None
        place = growing.size
        growing.size += len(record)
        self.on_disk += len(record)
        return place + 1

    def append_header(self, kind: str | None = None) -> None:
        """Writes the header again, into the files that are open or into one kind (opened if need be)."""
        for name, growing in self._growing.items():
            if name == kind or (kind is None and growing.file is not None):
                self.append(name, framed(HEADER, self.header_bytes()))

    def _new_file(self, growing: _Growing) -> Descriptor:
        self.number += 1
        path = self.folder / f"{self.number:08d}.{growing.suffix}"
        start = MAGIC + framed(HEADER, self.header_bytes())
        file = self.open_private(path.name, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_whole(file.fd, 0, start)
        except OSError:
            file.close()
            with contextlib.suppress(OSError):
                path.unlink()
            raise
        growing.file, growing.path, growing.size = file, path, len(start)
        self.on_disk += len(start)
        return file

    def rotate(self, kind: str) -> Path | None:
        """Closes the file that grows; the next record starts another. The closed file, None where there was none."""
        growing = self._growing[kind]
        path, growing.path = growing.path, None
        file, growing.file = growing.file, None
        if file is not None:
            file.close()
        if path is not None and kind == "ticks":
            self.old_ticks.append((path, self.header.next_tick - 1))
        return path

    def growing(self, kind: str) -> Path | None:
        """The file that grows, None while there is none."""
        return self._growing[kind].path

    def size(self, kind: str) -> int:
        """Bytes in the file that grows."""
        growing = self._growing[kind]
        return growing.size if growing.path is not None else 0

    def header_bytes(self) -> bytes:
        return _encoder.encode(self.header)

    def delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.on_disk -= size

    def failed(self, error: OSError) -> None:
        self.counters["disk_errors"] += 1
        self.error = error
        self.retry_at = self._clock() + RETRY_S

    def sync(self) -> None:
        """Asks the disk to keep what was written (power loss; a killed process loses nothing without this)."""
        for growing in self._growing.values():
            if growing.file is not None and growing.file.is_ours:
                with contextlib.suppress(OSError):
                    os.fdatasync(growing.file.fd)

    # ---- state

    def write_state(self) -> bool:
        """False when the disk did not take it."""
        if self._state is not None and not self._state.is_ours:
            self.let_go()
        if self._state is None and (self._clock() < self.retry_at or not self.create() or self._state is None):
            self._behind = True
            return False
        self._generation += 1
        state = self.state
        body = struct.pack("<QQQQQ", self._generation, state.acked, state.marked, state.mark_from, state.mark_upto)
        slot = body + struct.pack("<I", zlib.crc32(body))
        try:
            os.pwrite(self._state.fd, slot.ljust(_SLOT, b"\0"), _SLOT * (self._generation % 2))
        except OSError as error:
            self._behind = True
            self.failed(error)
            return False
        self._behind = False
        return True

    def catch_up(self) -> None:
        """Once the disk takes something again: without the state, ticks that it did not let go of would look new."""
        if self._behind:
            self.write_state()

    def _read_state(self, file: Descriptor) -> None:
        best: tuple[int, ...] = ()
        with contextlib.suppress(OSError):
            data = os.pread(file.fd, 2 * _SLOT, 0)
            for offset in (0, _SLOT):
                slot = data[offset : offset + _STATE.size]
                if len(slot) == _STATE.size and zlib.crc32(slot[:-4]) == _STATE.unpack(slot)[-1]:
                    best = max(best, _STATE.unpack(slot))
        if best:
            self._generation, self.state = best[0], State(*best[1:5])


def write_whole(fd: int, size: int, data: bytes) -> None:
    """All of the data at the end of a file of `size` bytes, or none of it and OSError: a full disk writes a part before
    it says so."""
    written = 0
    try:
        while written < len(data):
            written += os.write(fd, memoryview(data)[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
            os.lseek(fd, size, os.SEEK_SET)
        raise


def framed(kind: bytes, payload: bytes) -> bytes:
    """A record as it stands in a file."""
    return FRAMING.pack(len(payload), zlib.crc32(payload, zlib.crc32(kind, VERSION)), kind) + payload


def records(data: bytes, *, start: int | None = None) -> Iterator[tuple[int, bytes, bytes]]:
    """(offset, kind, payload) of the whole records in a file's bytes. Behind a broken record nothing is looked for: its
    length cannot be trusted."""
    offset = (len(MAGIC) if data.startswith(MAGIC) else len(data)) if start is None else start
    while offset + FRAMING.size <= len(data):
        length, crc, kind = FRAMING.unpack_from(data, offset)
        end = offset + FRAMING.size + length
        if length > MAX_RECORD or end > len(data):
            return
        payload = data[offset + FRAMING.size : end]
        if zlib.crc32(payload, zlib.crc32(kind, VERSION)) != crc:
            return
        yield offset, kind, payload
        offset = end


def torn(data: bytes, end: int) -> bool:
    """Whether what follows the last whole record is the beginning of one that was being written, and not damage."""
    if not data.startswith(MAGIC):
        return MAGIC.startswith(data)
    rest = len(data) - end
    if rest < FRAMING.size:
        return True
    length, _, kind = FRAMING.unpack_from(data, end)
    return kind in (HEADER, TICK, DRAFT, FRAME) and length <= MAX_RECORD and end + FRAMING.size + length > len(data)


def decode_header(payload: bytes) -> Header:
    """Raises one of BAD_RECORD."""
    return _header_decoder.decode(payload)


def numbered(folder: Path, *suffixes: str) -> list[Path]:
    """The files with these suffixes, in the order in which they were begun."""
    return sorted((path for suffix in suffixes for path in folder.glob(f"*.{suffix}")), key=lambda path: path.name)


def must_be_known(folder: Path) -> None:
    """Raises SpoolVersionError where a file is of another version, as that of another environment with the same home
    may be: it is no damage, and whoever wrote it can read it. The CRC of its first record begins with its number, so
    that no damaged digit passes for one."""
    for path in numbered(folder, "ticks", "frames"):
        try:
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
        except OSError:
            continue
        found = _ANY_MAGIC.match(head)
        if found is not None and int(found[1]) != VERSION and _is_record(head, found.end(), int(found[1])):
            raise SpoolVersionError(
                f"{path.name} is of version {int(found[1])} of the spool, and this perfagent reads version {VERSION}: nothing "
                "was sent or changed; use `perfagent sync` of the installation that recorded it"
            )


def _is_record(data: bytes, offset: int, version: int) -> bool:
    if offset + FRAMING.size > len(data):
        return False
    length, crc, kind = FRAMING.unpack_from(data, offset)
    payload = data[offset + FRAMING.size :][:length]
    start = version if version > 1 else 0
    return bool(len(payload) == length and zlib.crc32(payload, zlib.crc32(kind, start)) == crc)


def number_of(path: Path) -> int:
    match = re.match(r"\d+", path.name)
    return int(match.group()) if match else 0


def owner(folder: Path, *, at_once: bool = False) -> Header | None:
    """The newest header in a source's folder, without taking its lock; None where there is none. at_once: of the head of
    its newest file alone."""
    found: Header | None = None
    for path in numbered(folder, "ticks", "frames", "corrupt")[-1 if at_once else 0 :]:
        try:
            with path.open("rb") as file:
                data = file.read(_HEAD_BYTES if at_once else -1)
        except OSError:
            continue
        for _, kind, payload in records(data):
            if kind == HEADER:
                with contextlib.suppress(*BAD_RECORD):
                    header = decode_header(payload)
                    if found is not None and not header.run:
                        header.run, header.attempt = found.run, found.attempt
                    found = header
    return found


def folders(root: Path, *, max_age_s: float = math.inf) -> list[Path]:
    """The folders of sources under a root, oldest first, as far as something in them is younger than `max_age_s`."""
    found = []
    with contextlib.suppress(OSError):
        for folder in root.iterdir():
            with contextlib.suppress(OSError):  # no folder, or gone meanwhile
                inside = [*folder.iterdir()]
                if not any(path.suffix in (".ticks", ".frames") for path in inside):
                    continue
                touched = max(entry.stat().st_mtime for entry in (folder, *inside))
                if time.time() - touched <= max_age_s:
                    found.append((touched, folder))
    return [folder for _, folder in sorted(found)]
