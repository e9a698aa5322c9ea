"""What the DataLoader's workers hold of their own, `process/workers_pss_bytes`.

A forked worker shares the dataset's pages with the training process until one of them writes there; a Python object is
written to whenever it is looked at, by its reference count. Resident memory counts such a page in each process, before
and after the copy, so it stays as it was. In the proportional size (PSS) each counts its share.

The kernel walks all pages for it: 0.1 ms for 12 MiB, 60 ms for 600 MiB, in which the worker cannot map memory. So it
is asked for on the courier's thread, of one worker at a time, and as seldom as keeps it below 0.2 % of a core.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

from perfagent.samplers.process import started

__all__ = ["EVERY_S", "WorkerMemory"]

EVERY_S = 5.0
_SHARE = 0.002
_OWN = re.compile(rb"^Pss_Anon:\s*(\d+) kB", re.MULTILINE)


class WorkerMemory:
    """`poll()` emits the series, from the moment at which each worker was asked once. spent: seconds of CPU of the
    calling thread."""

    def __init__(
        self,
        emit: Callable[[dict[str, float]], None],
        proc: Path = Path("/proc"),
        *,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        self._emit, self._proc, self._clock, self._spent = emit, proc, clock, spent
        self._known: dict[int, int] = {}
        """Process id -> bytes, in the order in which they were asked."""
        self._due = 0.0

    def poll(self) -> bool:
        """At most every EVERY_S seconds. False where the system does not tell."""
        now = self._clock()
        if now < self._due:
            return True
        pids = started()
        self._known = {pid: size for pid, size in self._known.items() if pid in pids}
        new = next((pid for pid in pids if pid not in self._known), None)
        asked = next(iter(self._known), None) if new is None else new
        if asked is None:
            return True
        began = self._spent()
        try:
            found = _OWN.search((self._proc / str(asked) / "smaps_rollup").read_bytes())
        except ProcessLookupError:  # it has just ended
            return True
        except OSError:
            return (self._proc / "self" / "smaps_rollup").exists()
        self._due = now + (self._spent() - began) / _SHARE
        if found is None:  # a kernel before 5.4, or one that has ended
            return True
        self._known.pop(asked, None)
        self._known[asked] = 1024 * int(found[1])
        if len(self._known) == len(pids):
            self._emit({"process/workers_pss_bytes": float(sum(self._known.values()))})
        return True
