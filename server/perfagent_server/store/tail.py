"""What a tail row holds of a frame: groups and events, much as they came.

The time on the sender's monotonic clock is left out, for nothing behind the acknowledgement reads it, and so are the steps of
rows that have no gap. The rest is not packed any further: that takes as much time as writing less of it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from perfagent.wire import Event, Group
from perfagent_server.store.cells import Floats, Ints

__all__ = ["TailGroup", "last_step", "newest", "pack_tail", "step_range", "unpack_tail", "unpack_whole"]

_FEW = 64  # rows: below this numpy costs more than it saves


class TailGroup(msgspec.Struct, array_like=True):
    """A group as it lies in the tail: the checks of wire.Group were made when it came. first: the first step of rows whose
    steps follow each other, and then `step` is empty."""

    first: int
    step: bytes
    time: bytes
    values: dict[str, bytes]

    @property
    def rows(self) -> int:
        return len(self.time) // 8

    @property
    def steps(self) -> Ints:
        return np.frombuffer(self.step, "<i8") if self.step else np.arange(self.first, self.first + self.rows)

    @property
    def last_step(self) -> int:
        return int(np.frombuffer(self.step, "<i8").max()) if self.step else self.first + self.rows - 1

    @property
    def times(self) -> Floats:
        return np.frombuffer(self.time, "<f8")

    def whole(self) -> Group:
        """The group as readers behind the acknowledgement know it: its monotonic times are its times."""
        return Group(self.steps.tobytes(), self.time, self.time, self.values)


_encoder = msgspec.msgpack.Encoder()
_whole_decoder = msgspec.msgpack.Decoder(tuple[list[TailGroup], list[Event]])
_group_decoder = msgspec.msgpack.Decoder(tuple[list[TailGroup], msgspec.Raw])


def pack_tail(groups: Sequence[Group], events: Sequence[Event]) -> bytes:
    return _encoder.encode(([_packed(group) for group in groups], events))


def unpack_tail(frame: bytes) -> list[TailGroup]:
    """The groups only."""
    return _group_decoder.decode(frame)[0]


def unpack_whole(frame: bytes) -> tuple[list[Group], list[Event]]:
    groups, events = _whole_decoder.decode(frame)
    return [group.whole() for group in groups], events


def step_range(group: Group) -> tuple[int, int]:
    """Lowest and highest step of a group that has rows."""
    if group.rows < _FEW:
        few = group.steps()
        return min(few), max(few)
    steps = np.frombuffer(group.step, "<i8")
    return int(steps.min()), int(steps.max())


def last_step(frame: bytes) -> int:
    """Highest step of a frame; -1 without samples."""
    return max((group.last_step for group in unpack_tail(frame)), default=-1)


def newest(group: TailGroup) -> tuple[int, float, int]:
    """Step, time and row of the newest sample of a group."""
    steps, times = group.steps, group.times
    row = len(steps) - 1
    if row and (np.diff(steps) <= 0).any():
        row = int(np.lexsort((times, steps))[-1])
    return int(steps[row]), float(times[row]), row


def _packed(group: Group) -> TailGroup:
    if group.rows >= _FEW:
        steps = np.frombuffer(group.step, "<i8")
        if (np.diff(steps) == 1).all():
            return TailGroup(int(steps[0]), b"", group.time, group.values)
    return TailGroup(0, group.step, group.time, group.values)
