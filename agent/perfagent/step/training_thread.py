"""Training that moves from one thread to another: the next trial of a search in a thread of its own, or each step in whichever
thread a pool has free (`asyncio.to_thread`).

What another thread trains beside the one that counts is none of its steps. So a training has moved where that thread is no more,
or where the very optimizer that counts steps on another one.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["OneOfThreads", "lives"]

_MOST = 64


class OneOfThreads(int):
    """In the place of the ident of the thread that trains: equal to those of all that have stepped the optimizer, since they take
    turns, and to no other's: what runs there may be another training."""

    known: tuple[int, ...]

    @classmethod
    def of(cls, *threads: int) -> OneOfThreads:
        """The newest last; of more than 64 the oldest are forgotten, as a pool that makes a thread for each step has them."""
        made = cls(threads[-1])
        made.known = threads[-_MOST:]
        return made

    def __eq__(self, other: object) -> bool:
        return other in self.known

    def __ne__(self, other: object) -> bool:
        return other not in self.known

    __hash__ = int.__hash__


def lives(thread: int) -> bool:
    """Whether there is a thread with that ident, of Python's or one that was started by something else."""
    return thread in getattr(threading, "_active", {}) or thread in sys._current_frames()
