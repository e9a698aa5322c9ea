"""Writes the files of one source's spool (records.py): segments that only grow, a lock, two slots of state.

What the kinds of records hold and when a file may go is decided in spool.py and backlog.py. Here: a write happens whole
or leaves no trace, and an error of the disk is kept in `error` and never raised to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from perfagent.delivery.records import HEADER, MAGIC, Header, framed, numbered, write_whole
from perfagent.process.descriptors import Descriptor, opened

__all__ = ["Segments", "SpoolBusyError", "State"]

SEGMENT_BYTES = 8 * 2**20
RETRY_S = 1.0
"""After an error of the disk nothing is tried for so long."""
LOOK_S = 1.0
"""So often it is looked whether the files are still there and ours that are not written to."""
_STATE = struct.Struct("<QQQQQI")  # generation, the fields of State, CRC-32 of the rest
_SLOT = 64
_encoder = msgspec.msgpack.Encoder()


class SpoolBusyError(Exception):
    """Another process owns this source: its flock is held."""


class State(msgspec.Struct):
    """What must survive although it changes with every frame. marked: the frame sent last, which holds the ticks after
    `mark_from` up to `mark_upto`; acked: everything up to this frame is with the server."""

    acked: int = 0
    marked: int = 0
    mark_from: int = 0
    mark_upto: int = 0


class _Growing(msgspec.Struct):
    """The file of one kind that is being written. `file` and `path` are there or not together."""

    file: Descriptor | None = None
    path: Path | None = None
    size: int = 0


class Segments:
    """The folder of one source. `kind` is "ticks" or "frames" throughout.

    error: why the last write failed, None once one succeeded. on_disk: bytes in the files. old_ticks: files of ticks that
    no longer grow, with the last tick in each. growing: by kind, the file that is being written.
    """

    def __init__(
        self, folder: Path, header: Header, *, segment_bytes: int = SEGMENT_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """segment_bytes: of one file. clock: by which a disk that failed is tried again."""
        self.folder, self.header = folder, header
        self.counters: Counter[str] = Counter()
        self._segment_bytes, self._clock = segment_bytes, clock
        self.state = State()
        self.error: OSError | None = None
        self.on_disk = 0
        self.retry_at = 0.0
        self.number = 0
        self.old_ticks: list[tuple[Path, int]] = []
        self._ready = False
        self._generation = 0
        self._behind = False
        """Whether the state on the disk is an older one, since the disk did not take the last."""
        self._lock: Descriptor | None = None
        self._state: Descriptor | None = None
        self._look_at = 0.0
        self.growing = {kind: _Growing() for kind in ("ticks", "frames")}

    # ---- opening and closing

    def create(self) -> bool:
        """Makes the folder and takes its lock. False (and `error`) when the disk does not allow it; try again later."""
        if self._ready:
            return True
        try:
            for missing in [p for p in (self.folder, *self.folder.parents) if not p.exists()][::-1]:
                missing.mkdir(mode=0o700, exist_ok=True)
            lock = self._take_lock()
            with contextlib.suppress(OSError):  # on a full disk the watcher finds nothing, and the next start delivers
                os.ftruncate(lock.fd, 0)
                os.pwrite(lock.fd, f"{self.header.pid} {self.header.pid_start}".encode("ascii"), 0)
            self._state = opened(self.folder / "state", os.O_RDWR | os.O_CREAT)
            if os.fstat(self._state.fd).st_size < 2 * _SLOT:
                self.write_state()
            self._ready = True
        except (OSError, SpoolBusyError) as error:
            self._let_go()
            self.failed(error if isinstance(error, OSError) else OSError(errno.EBUSY, str(error)))
            return False
        return True

    def take_over(self) -> None:
        """With the lock: the state that a dead process left. Raises OSError."""
        self._state = opened(self.folder / "state", os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(OSError):
            data = os.pread(self._state.fd, 2 * _SLOT, 0)
            slots = (data[:_SLOT][: _STATE.size], data[_SLOT:][: _STATE.size])
            whole = [s for s in slots if len(s) == _STATE.size and zlib.crc32(s[:-4]) == _STATE.unpack(s)[-1]]
            self._generation, *found, _ = max(map(_STATE.unpack, whole), default=(0, 0, 0, 0, 0, 0))
            self.state = State(*found)
        self._ready = True

    def _take_lock(self) -> Descriptor:
        """Raises SpoolBusyError while another process holds it, OSError for trouble of the disk."""
        self._lock = lock = opened(self.folder / "lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._let_go()
            if isinstance(error, BlockingIOError):
                raise SpoolBusyError(f"{self.folder} belongs to a running process") from error
            raise
        return lock

    def abandon(self) -> None:
        """Closes the files and does nothing else; nothing is written afterwards."""
        self._let_go()
        self.retry_at = math.inf

    def _let_go(self) -> None:
        """Closes the files; they may be opened again, and what grew is not written to any more."""
        for kind in self.growing:
            with contextlib.suppress(OSError):
                self.rotate(kind)
        for file in (self._state, self._lock):
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()
        self._state = self._lock = None
        self._ready = False

    def forked(self) -> None:
        """In a forked child: closes the files, also those that the parent's threads had just opened, and orphans'."""
        self.abandon()
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
            files = [self._lock, self._state, *(growing.file for growing in self.growing.values())]
        for one in files:
            deleted = one.is_deleted if one is not None else False
            if deleted:
                self.failed(FileNotFoundError(errno.ENOENT, "its files were deleted"))
                return False
            if deleted is None:
                self._let_go()
                break
        return True

    # ---- writing

    def write(self, kind: str, record: bytes) -> int:
        """Appends one record; its offset + 1, or 0 when the disk did not take it all (then none of it stays)."""
        now = self._clock()
        if now < self.retry_at or not self._is_there(self.growing[kind].file, now) or not self.create():
            return 0
        self.catch_up()
        try:
            if self.growing[kind].size + len(record) > self._segment_bytes:
                self.rotate(kind)
            growing = self.growing[kind]
            file = growing.file or self._begin_file(kind, growing)
            write_whole(file.fd, growing.size, record)
        except OSError as error:
            self.failed(error)
            return 0
        self.error = None
        growing.size += len(record)
        self.on_disk += len(record)
        return growing.size - len(record) + 1

    def write_header(self, kind: str | None = None) -> None:
        """Writes the header again, into the files that are open or into one kind (opened if need be)."""
        for name, growing in self.growing.items():
            if name == kind or (kind is None and growing.file is not None):
                self.write(name, self.header_record())

    def header_record(self) -> bytes:
        return framed(HEADER, _encoder.encode(self.header))

    def _begin_file(self, kind: str, growing: _Growing) -> Descriptor:
        self.number += 1
        path = self.folder / f"{self.number:08d}.{kind}"
        start = MAGIC + self.header_record()
        file = opened(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
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
        growing, self.growing[kind] = self.growing[kind], _Growing()
        if growing.path is not None and kind == "ticks":
            self.old_ticks.append((growing.path, self.header.next_tick - 1))
        if growing.file is not None:
            growing.file.close()
        return growing.path

    def delete(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self.on_disk -= size

    def failed(self, error: OSError) -> None:
        self.counters["disk_errors"] += 1
        self.error = error
        self.retry_at = self._clock() + RETRY_S
        if isinstance(error, FileNotFoundError):  # somebody has deleted the files: the disk itself is well
            self._let_go()
            self.retry_at = 0.0
            self.on_disk = 0
            for path in numbered(self.folder, "ticks", "frames"):
                with contextlib.suppress(OSError):
                    self.on_disk += path.stat().st_size

    def sync(self) -> None:
        """Asks the disk to keep what was written (power loss; a killed process loses nothing without this)."""
        for growing in self.growing.values():
            with contextlib.suppress(OSError):
                if growing.file is not None and growing.file.is_ours:
                    os.fdatasync(growing.file.fd)

    # ---- state

    def write_state(self, state: State | None = None) -> bool:
        """False when the disk did not take it. state: the one that is to be, from here on."""
        self._behind = True
        if self._state is not None and not self._state.is_ours:
            self._let_go()
        if self._state is None and (self._clock() < self.retry_at or not self.create() or self._state is None):
            return False
        self._generation += 1
        slot = _STATE.pack(self._generation, *msgspec.structs.astuple(state or self.state), 0)[:-4]
        slot += struct.pack("<I", zlib.crc32(slot))
        try:
            os.pwrite(self._state.fd, slot.ljust(_SLOT, b"\0"), _SLOT * (self._generation % 2))
        except OSError as error:
            self.failed(error)
            return False
        self._behind = False
        return True

    def catch_up(self) -> None:
        """Once the disk takes something again: without the state, ticks that it did not let go of would look new."""
        if self._behind:
            self.write_state()
