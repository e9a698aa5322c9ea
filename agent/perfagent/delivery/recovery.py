"""Reads whatever is whole in the files of a source whose process is gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from perfagent.delivery import records
from perfagent.delivery.backlog import Kept, frames_in
from perfagent.delivery.row_packing import Packed, is_whole
from perfagent.delivery.segments import Segments
from perfagent.wire import Event

__all__ = ["Recovered", "Tick"]


class Tick(NamedTuple):
    """What was drained at once, with its number."""

    number: int
    packed: Sequence[Packed]
    events: Sequence[Event]


_decoder = msgspec.msgpack.Decoder(Tick)


def _tick_in(payload: bytes) -> Tick:
    """The tick in a record. Raises one of BAD_RECORD."""
    tick = _decoder.decode(payload)
    if not all(map(is_whole, tick.packed)):
        raise ValueError("a block of rows that ends within a row")
    return tick


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
        for path in records.numbered(files.folder, "ticks", "frames"):
            files.number = max(files.number, records.number_of(path))
            before = len(self.ticks)
            self._read_file(path)
            if path.suffix == ".ticks":
                files.old_ticks.append((path, self.ticks[-1].number if len(self.ticks) > before else 0))

    def _read_file(self, path: Path) -> None:
        """Up to where something is broken: the length of a broken record cannot be trusted. Nobody writes there any more."""
        try:
            data = path.read_bytes()
        except OSError as error:
            self._files.counters["unreadable"] += 1
            self._files.failed(error)
            return
        self._files.on_disk += len(data)
        end = len(records.MAGIC) if data.startswith(records.MAGIC) else 0
        sound = True
        for offset, kind, payload in records.records_in(data):
            try:
                self._take(kind, payload, path, offset)
            except records.BAD_RECORD:
                sound = False
                break
            end = offset + records.FRAMING.size + len(payload)
        if sound and records.torn(data, end):
            self._files.counters["torn_bytes"] += len(data) - end
        elif end < len(data):
            self._files.counters["corrupt"] += 1

    def _take(self, kind: bytes, payload: bytes, path: Path, offset: int) -> None:
        if kind == records.HEADER:
            header, ours = records.decode_header(payload), self._files.header
            ours.next_seq, ours.next_tick = max(ours.next_seq, header.next_seq), max(ours.next_tick, header.next_tick)
            if header.run:
                ours.run, ours.attempt = header.run, header.attempt
            ours.closed = ours.closed or header.closed
        elif kind == records.TICK:
            self.ticks.append(_tick_in(payload))
        elif kind == records.FRAME:
            old, kept = frames_in(payload, path, offset)
            self.replaced.add(old)
            self.frames.update((one.seq, one) for one in kept)
