"""What a job recorded offline (PERFAGENT_RECORD, attach(record=...), `perfagent run --record`), for programs that read
it and send nothing.

Everything happens on a copy of each process's files: to open a spool is to take its lock and to cut its torn end, and a
job that still trains must not notice.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from perfagent.delivery.records import numbered
from perfagent.delivery.spool import Spool, SpoolBusyError, folders
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
    with tempfile.TemporaryDirectory(prefix="perfagent-recording-") as scratch:
        copy = Path(scratch) / folder.name
        try:
            shutil.copytree(folder, copy)
            spool = Spool.open(copy, recording=True)
        except (OSError, shutil.Error, SpoolBusyError) as error:
            raise ResourceError(f"{folder} cannot be read: {error}") from error
        try:
            header = spool.header
            read = Recorded(
                header.project, header.run or f"rank-{header.source[:12]}", header.name, header.source, header.attempt,
                header.rank,
            )  # fmt: skip
            while (outgoing := spool.next()) is not None:
                read.groups += outgoing.groups
                read.events += outgoing.events
                spool.ack(outgoing.seq)
            read.damaged = spool.counters["corrupt"] + spool.counters["unreadable"]
        finally:
            spool.abandon()
    return read
