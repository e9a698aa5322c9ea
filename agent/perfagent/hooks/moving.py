"""Training that moves from one thread to another: the next trial of a search in a thread of its own, or each step in whichever
thread a pool has free (`asyncio.to_thread`).

What another thread trains beside the one that counts is none of its steps. So a training has moved where that thread is no more,
or where the very optimizer that counts steps on another one.
"""

from __future__ import annotations

import sys
import threading

__all__ = ["AnyThread", "lives"]


class AnyThread(int):
    """In the place of the ident of the thread that trains: equal to that of every thread, since they take turns in it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def lives(thread: int) -> bool:
    """Whether there is a thread with that ident, of Python's or one that was started by something else."""
    return thread in getattr(threading, "_active", {}) or thread in sys._current_frames()
