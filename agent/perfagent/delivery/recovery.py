"""Reads whatever is whole in the files of a source whose process is gone. Broken files are set aside, torn ends cut."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec

from perfagent.delivery.backlog import Kept, frames_in
from perfagent.delivery.drafts import Draft
from perfagent.delivery.records import (
    BAD_RECORD,
    DRAFT,
    FRAME,
    FRAMING,
    HEADER,
    MAGIC,
    TICK,
    decode_header,
    number_of,
    numbered,
    records_in,
    replace_file,
    torn,
)
from perfagent.delivery.row_packing import Packed
from perfagent.delivery.segments import Segments
from perfagent.wire import Event, Group

__all__ = ["Recovered", "Tick", "drafted"]


class Tick(msgspec.Struct):
    """What was drained at once. draft: of what its groups are still to be made."""

    number: int
    groups: list[Group]
    events: list[Event]
    draft: Draft | None = None


class _Drafted(msgspec.Struct, array_like=True):
    """A draft with its tick's number, as it is on the disk."""

    number: int
    context: list[Any]
    rows: list[Any]
    packed: list[tuple[tuple[str, ...], bytes]] = []


_tick_decoder = msgspec.msgpack.Decoder(tuple[int, list[Group], list[Event]])
_draft_decoder = msgspec.msgpack.Decoder(_Drafted)


def drafted(payload: bytes) -> tuple[int, Draft]:
    """A tick's number, and the draft that it is. Raises msgspec.DecodeError."""
    found = _draft_decoder.decode(payload)
    return found.number, Draft(found.context, found.rows, [Packed(*block) for block in found.packed])


class Recovered:
    """Read from the files in their order. Their header learns what they say of the source.

    ticks: all that are there, also those that a frame holds. frames: by their numbers. replaced: numbers of those that
    were written anew in other frames.
    """

    def __init__(self, files: Segments) -> None:
        self.ticks: list[Tick] = []
        self.frames: dict[int, Kept] = {}
        self.replaced: set[int] = set()
        self._files = files
        for path in numbered(files.folder, "ticks", "frames"):
            files.number = max(files.number, number_of(path))
            before = len(self.ticks)
            self._read_file(path)
            if path.suffix == ".ticks":
                files.old_ticks.append((path, self.ticks[-1].number if len(self.ticks) > before else 0))

    def _read_file(self, path: Path) -> None:
        """A torn end is cut off; where something else is broken, what is whole before it is read, the file is renamed
        to .corrupt, and the whole part is written anew under the old name."""
        try:
            data = path.read_bytes()
        except OSError as error:
            self._files.counters["unreadable"] += 1
            self._files.failed(error)
            return
        end = len(MAGIC) if data.startswith(MAGIC) else 0
        sound = True
        for offset, kind, payload in records_in(data):
            try:
                self._take(kind, payload, path, offset)
            except BAD_RECORD:
                sound = False
                break
            end = offset + FRAMING.size + len(payload)
        self._files.on_disk += end
        if end == len(data):
            return
        with contextlib.suppress(OSError):
            if sound and torn(data, end):
                os.truncate(path, end)
                self._files.counters["torn_bytes"] += len(data) - end
                return
            self._files.counters["corrupt"] += 1
            broken = path.with_name(path.name + ".corrupt")
            try:
                os.link(path, broken)
            except FileExistsError:  # of a process that was killed here
                pass
            except OSError:  # a file system without links
                shutil.copyfile(path, broken)
            replace_file(path, data[:end])  # the last: until then all of it is under the old name

    def _take(self, kind: bytes, payload: bytes, path: Path, offset: int) -> None:
        if kind == HEADER:
            header, ours = decode_header(payload), self._files.header
            ours.next_seq, ours.next_tick = max(ours.next_seq, header.next_seq), max(ours.next_tick, header.next_tick)
            if header.run:
                ours.run, ours.attempt = header.run, header.attempt
            ours.closed = ours.closed or header.closed
        elif kind == TICK:
            self.ticks.append(Tick(*_tick_decoder.decode(payload)))
        elif kind == DRAFT:
            number, draft = drafted(payload)
            self.ticks.append(Tick(number, [], [], draft))
        elif kind == FRAME:
            old, kept = frames_in(payload, path, offset)
            self.replaced.add(old)
            self.frames.update((one.seq, one) for one in kept)
