"""What waits for the writer, by run: each run has its turn, so that the backlog of one delays no other.

A transaction takes one delivery of each run after the other, and of one run no more than a share: also who comes while a
backlog is being written waits for a short transaction only.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

__all__ = ["FairQueue", "Waiting"]

MAX_FRAMES = 512  # in one transaction: about 0.1 s of writing
MAX_BYTES = 32 * 2**20  # the same, of samples
MAX_FRAMES_OF_RUN = 128
MAX_BYTES_OF_RUN = 8 * 2**20


class Waiting(Protocol):
    """Frames that are stored together. run: whose turn it is; count: of frames; size: bytes of samples."""

    @property
    def run(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def size(self) -> int: ...


Delivery = TypeVar("Delivery", bound=Waiting)


class _Sum:
    """frames, and bytes of samples."""

    __slots__ = ("frames", "size")

    def __init__(self) -> None:
        self.frames = self.size = 0

    def add(self, delivery: Waiting, sign: int = 1) -> None:
        self.frames += sign * delivery.count
        self.size += sign * delivery.size

    def is_full(self, delivery: Waiting, frames: int, size: int) -> bool:
        """Whether this delivery is too much; never the first, however large."""
        return self.frames > 0 and (self.frames + delivery.count > frames or self.size + delivery.size > size)


class FairQueue(Generic[Delivery]):
    """Not safe from several threads: its owner has a lock."""

    def __init__(self) -> None:
        self._of: dict[str, deque[Delivery]] = {}  # in the order of their next turns
        self._held: dict[str, _Sum] = {}
        self._all = _Sum()

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def frames(self) -> int:
        return self._all.frames

    @property
    def size(self) -> int:
        """Bytes of samples."""
        return self._all.size

    def held(self, run: str) -> tuple[int, int]:
        """Frames and bytes of a run that wait."""
        held = self._held.get(run)
        return (0, 0) if held is None else (held.frames, held.size)

    def put(self, delivery: Delivery) -> None:
        self._of.setdefault(delivery.run, deque()).append(delivery)
        self._held.setdefault(delivery.run, _Sum()).add(delivery)
        self._all.add(delivery)

    def take_all(self) -> list[Delivery]:
        taken: list[Delivery] = []
        while self._of:
            taken.append(self._take_next(next(iter(self._of))))
        return taken

    def take_batch(self) -> list[Delivery]:
        """What one transaction stores."""
        taken: list[Delivery] = []
        batch, shares = _Sum(), dict[str, _Sum]()
        turns = deque(self._of)
        while turns:
            run = turns.popleft()
            delivery, share = self._of[run][0], shares.setdefault(run, _Sum())
            if batch.is_full(delivery, MAX_FRAMES, MAX_BYTES):
                break
            if share.is_full(delivery, MAX_FRAMES_OF_RUN, MAX_BYTES_OF_RUN):
                continue
            taken.append(self._take_next(run))
            batch.add(delivery)
            share.add(delivery)
            if run in self._of:
                turns.append(run)
        return taken

    def _take_next(self, run: str) -> Delivery:
        """The first delivery of a run, whose next turn then comes after everybody else's."""
        waiting = self._of.pop(run)
        delivery = waiting.popleft()
        self._held[run].add(delivery, -1)
        self._all.add(delivery, -1)
        if waiting:
            self._of[run] = waiting
        else:
            del self._held[run]
        return delivery
