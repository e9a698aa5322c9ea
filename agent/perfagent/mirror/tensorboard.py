"""Writes the series of a run as TensorBoard event files while they are recorded.

Rank 0 of a job writes the files, on the sender's thread, each time a frame is made: a kill loses the seconds since the last
frame. Each series is written under its name; some have a second tag (`ALIASES`). epochs.py adds sums over epochs.

The format is a file of records with checksums (TFRecord), each an `Event` message. TensorBoard's own record writer and
messages are used, without its `SummaryWriter`: that has a thread and a queue, and a fork while their lock is held would
hang the child. tensorboardX does the same and is one more package.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perfagent.mirror.epochs import Epochs
from perfagent.process.descriptors import Descriptor, above_streams
from perfagent.wire import Group

__all__ = ["ALIASES", "TensorBoardMirror"]

ALIASES = {
    "cuda/allocated_bytes": ("System/GPU_Memory_GB", 1e-9),
    "cuda/reserved_bytes": ("System/GPU_Cached_GB", 1e-9),
    "samples_per_s": ("System/Samples_Per_Second", 1.0),
}
"""Name of a series -> a second tag for it, and by what its values are multiplied."""
_numbers = itertools.count()


class TensorBoardMirror:
    """One event file in `folder`; both are made when there is something to write. Raises OSError where it cannot be
    written."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer import record_writer

        self.folder = folder
        self._event, self._summary, self._writer = event_pb2.Event, summary_pb2.Summary, record_writer.RecordWriter
        self._epochs = Epochs()
        self._file: Descriptor | None = None

    def take(self, groups: Iterable[Group], begins: deque[int]) -> None:
        """Writes groups of samples. begins: the first steps of new epochs, which are taken out."""
        listed = [*groups]
        events = [event for group in listed for event in self._rows(group)]
        events += [self._scalars(*epoch) for epoch in self._epochs.add(listed, begins)]
        if events:
            self._write(events)

    def close(self) -> None:
        """Writes the epoch in progress, and lets go of the file."""
        if self._file is None:
            return
        try:
            self._write([self._scalars(*epoch) for epoch in self._epochs.end()])
        finally:
            self._file.close()

    def _rows(self, group: Group) -> Iterable[Any]:
        names = [*group.values]
        columns = [group.column(name) for name in names]
        for step, at, *values in zip(group.steps(), group.times(), *columns, strict=True):
            row = dict(zip(names, values, strict=True))
            row |= {tag: row[name] * factor for name, (tag, factor) in ALIASES.items() if name in row}
            yield self._scalars(step, at, row)

    def _scalars(self, step: int, at: float, values: dict[str, float]) -> Any:
        entries = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        return self._event(wall_time=at, step=step, summary=self._summary(value=entries))

    def _begin(self) -> Descriptor:
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        return Descriptor(above_streams(os.open(self.folder / name, flags, 0o666)))  # for whoever may read the folder

    def _write(self, events: list[Any]) -> None:
        if self._file is None:
            self._file = self._begin()
            events = [self._event(wall_time=time.time(), file_version="brain.Event:2"), *events]
        records = io.BytesIO()
        writer = self._writer(records)
        for event in events:
            writer.write(event.SerializeToString())
        data = memoryview(records.getvalue())
        if not self._file.is_ours:
            raise OSError(f"its file in {self.folder} was closed")
        while data:
            data = data[os.write(self._file.fd, data) :]
