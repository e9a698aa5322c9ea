"""What a tail row holds of a frame: groups and events, much as they came.

The time on the sender's monotonic clock is left out, for nothing behind the acknowledgement reads it, and so are the steps of
rows that have no gap. Times of many rows are kept as how far each difference is off the mean one, in two or four bytes. The rest
is not packed any further: that takes as much time as writing less of it saves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from perfagent.wire import Event, Group
from perfagent_server.store.cells import Floats, Ints

__all__ = ["TailGroup", "last_step", "newest", "pack_tail", "step_range", "unpack_tail", "unpack_whole"]

_FEW = 64  # rows: below this numpy costs more than it saves


class Ticks(msgspec.Struct, array_like=True):
    """What the times of a group count from, as integers of the same bits. every: the mean difference of two rows."""

    rows: int
    first: int
    every: int


class TailGroup(msgspec.Struct, array_like=True):
    """A group as it lies in the tail: the checks of wire.Group were made when it came. first: the first step of rows whose
    steps follow each other, and then `step` is empty. stamps: the times, or with `ticks` what each difference is off theirs."""

    first: int
    step: bytes
    stamps: bytes
    values: dict[str, bytes]
    ticks: Ticks | None = None

    @property
    def rows(self) -> int:
        return len(self.stamps) // 8 if self.ticks is None else self.ticks.rows

    @property
    def steps(self) -> Ints:
        return np.frombuffer(self.step, "<i8") if self.step else np.arange(self.first, self.first + self.rows)

    @property
    def last_step(self) -> int:
        return int(np.frombuffer(self.step, "<i8").max()) if self.step else self.first + self.rows - 1

    @property
    def times(self) -> Floats:
        if self.ticks is None:
            return np.frombuffer(self.stamps, "<f8")
        off = np.frombuffer(self.stamps, f"<i{len(self.stamps) // (self.ticks.rows - 1)}")
        bits = np.empty(self.ticks.rows, "<i8")
        bits[0] = self.ticks.first
        np.add(off, self.ticks.every, out=bits[1:], dtype="<i8")
        return bits.cumsum().view("<f8")

    def whole(self) -> Group:
        """The group as readers behind the acknowledgement know it: its monotonic times are its times."""
        time = self.times.tobytes()
        return Group(self.steps.tobytes(), time, time, self.values)


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
    if group.rows < _FEW:
        return TailGroup(0, group.step, group.time, group.values)
    first, step = 0, group.step
    steps = np.frombuffer(step, "<i8")
    if int(steps[-1]) - int(steps[0]) == len(steps) - 1 and (steps[1:] - steps[:-1] == 1).all():
        first, step = int(steps[0]), b""
    stamps, ticks = _ticking(group.time)
    return TailGroup(first, step, stamps, group.values, ticks)


def _ticking(time: bytes) -> tuple[bytes, Ticks | None]:
    """Stamps and ticks of times, or the times as they are where a difference is far off. Sums and differences of int64 wrap
    around in both directions alike, so whatever the bits are, they come back."""
    bits = np.frombuffer(time, "<i8")
    first, last = int(bits[0]), int(bits[-1])
    every = (last - first) // (len(bits) - 1)
    if abs(every) >= 2**62:
        return time, None
    off = bits[1:] - bits[:-1]
    off -= every
    low, high = int(off.min()), int(off.max())
    for size in (2, 4):
        half = 1 << (8 * size - 1)
        if -half <= low and high < half:
            return off.astype(f"<i{size}").tobytes(), Ticks(len(bits), first, every)
    return time, None
