"""Reads what a job recorded offline (PERFAGENT_RECORD, attach(record=...), `perfagent run --record`); sends nothing.

Takes no lock and writes nothing: a job that still trains does not notice."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from perfagent.delivery.backlog import Backlog
from perfagent.delivery.records import Header, folders, must_be_known, numbered, owner
from perfagent.delivery.recovery import Recovered
from perfagent.delivery.row_packing import grouped
from perfagent.delivery.segments import Segments
from perfagent.errors import ResourceError
from perfagent.wire import Event, Group

__all__ = ["Recorded", "read_recording", "recorded_folders"]


@dataclass(slots=True)
class Recorded:
    """What one process recorded. run: the id of its run, or one of its own where it never learned it. damaged: files
    that could not be read to their ends."""

    project: str
    run: str
    name: str | None
    source: str
    attempt: int
    rank: int
    groups: list[Group] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    damaged: int = 0


def recorded_folders(folder: Path) -> list[Path]:
    """The folders of processes in the folder of a recording, or the folder itself where it is one of them."""
    return folders(folder) or ([folder] if numbered(folder, "ticks", "frames") else [])


def read_recording(folder: Path) -> list[Recorded]:
    """Every process that recorded there, by run, attempt and rank. Raises ResourceError for unreadable files."""
    found = [_read(source) for source in recorded_folders(folder)]
    return sorted(found, key=lambda one: (one.run, one.attempt, one.rank))


def _read(folder: Path) -> Recorded:
    try:
        must_be_known(folder)
    except OSError as error:
        raise ResourceError(f"{folder} cannot be read: {error}") from error
    header = owner(folder) or Header(source=folder.name, project="default", rank=0, server=None)
    files = Segments(folder, header)
    found, backlog = Recovered(files), Backlog(files, max_bytes=0, recording=True)
    run = header.run or f"rank-{header.source[:12]}"
    read = Recorded(header.project, run, header.name, header.source, header.attempt, header.rank)
    for seq, kept in sorted(found.frames.items()):
        if seq not in found.replaced and (frame := backlog.load(kept)) is not None:
            read.groups += frame.groups
            read.events += frame.events
    covered = max((kept.upto for kept in found.frames.values()), default=0)
    ticks = [tick for tick in found.ticks if tick.number > covered]
    read.groups += grouped(block for tick in ticks for block in tick.packed)
    read.events += [event for tick in ticks for event in tick.events]
    read.damaged = files.counters["corrupt"] + files.counters["unreadable"]
    return read
