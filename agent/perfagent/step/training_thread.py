"""Recognizes that training has moved to another thread: each trial of a search in its own thread, or each step on any
free thread of a pool (`asyncio.to_thread`).

A second training on another thread is not part of this one's steps. So training has moved only if its thread no longer
exists, or if the very optimizer that counts steps on another thread. (If the first thread counted for good, 5 of 40
steps by `asyncio.to_thread` were seen, and of cross-validation folds with a thread each only the first.)
"""

from __future__ import annotations

import sys
import threading

__all__ = ["OneOfThreads", "lives"]

_MOST = 64


class OneOfThreads(int):
    """Stands for the ident of the training thread where several threads take turns: equal to the ident of each thread
    that has stepped the optimizer, and of no other, since another thread may run another training."""

    known: tuple[int, ...]

    @classmethod
    def of(cls, *threads: int) -> OneOfThreads:
        """Takes the idents with the newest last. Forgets the oldest of more than 64, as where a pool makes a
        thread for each step."""
        made = cls(threads[-1])
        made.known = threads[-_MOST:]
        return made

    def __eq__(self, other: object) -> bool:
        return other in self.known

    def __ne__(self, other: object) -> bool:
        return other not in self.known

    __hash__ = int.__hash__


def lives(thread: int) -> bool:
    """True if a thread with that ident exists, whether Python or another library started it."""
    return thread in getattr(threading, "_active", {}) or thread in sys._current_frames()
