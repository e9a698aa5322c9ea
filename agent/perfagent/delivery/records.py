"""The format of a source's files, and what can be said of a folder without taking it over.

    <root>/<source>/        0700, files 0600
      lock                  flock'ed by the process that owns the source; free means that its process is dead
      state                 two slots of 64 bytes, written in place (that needs no space on a full disk)
      00000001.ticks        what was drained every 150 ms, packed
      00000002.frames       whole frames, compressed

A record is its payload's length, CRC-32 and kind, then the payload. A torn tail is distinguished from damage.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec

__all__ = [
    "BAD_RECORD", "FRAME", "FRAMING", "HEADER", "MAGIC", "MAX_RECORD", "TICK", "Header", "SpoolVersionError",
    "decode_header", "folders", "framed", "must_be_known", "number_of", "numbered", "owner", "records_in",
    "torn", "write_whole",
]  # fmt: skip

VERSION = 4
"""The CRC of a record begins with it. Earlier versions were never released, and are not read."""
MAGIC = b"perfagent spool %d\n" % VERSION
_HEAD_BYTES = 2**16
_ANY_MAGIC = re.compile(rb"perfagent spool (\d{1,9})\n")
FRAMING = struct.Struct("<IIc")  # length of the payload, CRC-32 of kind and payload, kind
HEADER, TICK, FRAME = b"H", b"T", b"F"
MAX_RECORD = 64 * 2**20
BAD_RECORD = (msgspec.DecodeError, ValueError, RecursionError, zlib.error)


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


_header_decoder = msgspec.msgpack.Decoder(Header)


def decode_header(payload: bytes) -> Header:
    """Raises one of BAD_RECORD."""
    return _header_decoder.decode(payload)


def _crc(kind: bytes, payload: bytes, version: int = VERSION) -> int:
    return zlib.crc32(payload, zlib.crc32(kind, version))


def framed(kind: bytes, payload: bytes) -> bytes:
    """A record as it stands in a file."""
    return FRAMING.pack(len(payload), _crc(kind, payload), kind) + payload


def records_in(data: bytes, *, start: int | None = None, version: int = VERSION) -> Iterator[tuple[int, bytes, bytes]]:
    """(offset, kind, payload) of the whole records, up to a broken one: its length cannot be trusted."""
    offset = (len(MAGIC) if data.startswith(MAGIC) else len(data)) if start is None else start
    while offset + FRAMING.size <= len(data):
        length, crc, kind = FRAMING.unpack_from(data, offset)
        end = offset + FRAMING.size + length
        payload = data[offset + FRAMING.size : end]
        if length > MAX_RECORD or end > len(data) or _crc(kind, payload, version) != crc:
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
    return kind in (HEADER, TICK, FRAME) and length <= MAX_RECORD and end + FRAMING.size + length > len(data)


def write_whole(fd: int, size: int, data: bytes) -> None:
    """All of the data at the end of a file of `size` bytes, or none of it and OSError."""
    written = 0
    try:
        while written < len(data):
            written += os.write(fd, memoryview(data)[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, size)
            os.lseek(fd, size, os.SEEK_SET)
        raise


# ---- folders of sources


def numbered(folder: Path, *suffixes: str) -> list[Path]:
    """The files with these suffixes, in the order in which they were begun."""
    return sorted((path for suffix in suffixes for path in folder.glob(f"*.{suffix}")), key=lambda path: path.name)


def number_of(path: Path) -> int:
    match = re.match(r"\d+", path.name)
    return int(match.group()) if match else 0


def _head(path: Path, size: int = _HEAD_BYTES) -> bytes:
    """The beginning of a file, of -1: all of it; nothing where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(size)
    return b""


def must_be_known(folder: Path) -> None:
    """Raises SpoolVersionError where a file is of another version, as that of another environment with the same home
    may be: it is no damage, and whoever wrote it can read it. A damaged digit names a version that the records are not
    of."""
    for path in numbered(folder, "ticks", "frames"):
        head = _head(path)
        found = _ANY_MAGIC.match(head)
        version = VERSION if found is None else int(found[1])
        crc_of = version if version > 1 else 0  # the first version had none in its CRC
        if found and version != VERSION and any(records_in(head, start=found.end(), version=crc_of)):
            raise SpoolVersionError(
                f"{path.name} is of version {version} of the spool, and this perfagent reads version {VERSION}: "
                "nothing was sent or changed; use `perfagent sync` of the installation that recorded it"
            )


def owner(folder: Path, *, at_once: bool = False) -> Header | None:
    """The newest header in a source's folder, without its lock. at_once: from the head of its newest file alone."""
    found: Header | None = None
    for path in numbered(folder, "ticks", "frames")[-1 if at_once else 0 :]:
        for _, kind, payload in records_in(_head(path, _HEAD_BYTES if at_once else -1)):
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
                touched = max(entry.stat().st_mtime for entry in (folder, *inside))
                if any(path.suffix in (".ticks", ".frames") for path in inside) and time.time() - touched <= max_age_s:
                    found.append((touched, folder))
    return [folder for _, folder in sorted(found)]
