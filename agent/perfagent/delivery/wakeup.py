"""Starting and waking the agent's threads, and letting the training thread go first.

A waiting thread wakes up seven times a second with cold caches for as long as a training runs: 45 µs of CPU each time
with a `Bell`, 90 with a threading.Event, which makes a lock for each wait (measured next to a training). What it then
does runs 1.8 times as slowly as in a loop of its own, and its first encoding of a row takes 5 times as long.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time

__all__ = ["Bell", "start_deaf", "yield_gil"]

YIELD_S = 1e-4
HURRY = 1000
_FAULTS = {"SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL", "SIGABRT", "SIGTRAP", "SIGSYS"}
"""Signals of a fault in the thread itself: never blocked, so faulthandler can report."""


def start_deaf(thread: threading.Thread) -> None:
    """Starts a thread to which no signal is delivered, nor to those that it starts.

    A script that blocks SIGTERM while it saves, or that waits for a signal with sigwait, means all threads that it
    knows of: the kernel must not give the signal to one of ours.
    """
    deaf = {number for number in signal.valid_signals() if getattr(number, "name", "") not in _FAULTS}
    # inherited by the new thread, so that there is no moment between
    before = signal.pthread_sigmask(signal.SIG_BLOCK, deaf)
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def yield_gil(behind: int = 0) -> None:
    """Lets the training thread have the interpreter between two pieces of work: it would wait for up to 5 ms.

    behind: rows that wait. A training thread that computes in Python keeps the interpreter for 5 ms each time: with
    200 log() calls in a step of 5 ms, 60 % of the rows were dropped. From `HURRY` on the two take turns as usual.
    """
    if behind < HURRY:
        time.sleep(YIELD_S)


class Bell:
    """A ring that nobody waits for is kept; several are one. Any thread may ring; one waits."""

    __slots__ = ("_silent",)

    def __init__(self) -> None:
        self._silent = threading.Lock()  # held while it has not been rung
        self._silent.acquire()

    def ring(self) -> None:
        """Never blocks."""
        with contextlib.suppress(RuntimeError):  # it was rung already
            self._silent.release()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it was rung within that time (None: forever), or before and nobody had waited since."""
        return self._silent.acquire(timeout=-1 if timeout_s is None else max(0.0, timeout_s))
