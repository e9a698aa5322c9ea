"""Waits for the process group of a process that multiprocessing started (mp.spawn) and that attaches before it joins one.

It has no rank yet, and may be a training of its own (a pool's worker, a trial of a search). Until it joins a group, ends its
first step or has had `ALONE_AFTER_S` for either, what it measures waits in the spool, whose header names the run that it is
if it is alone: else the data of one that is killed meanwhile would never be sent.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

__all__ = ["Joining", "in_group", "may_join"]

ALONE_AFTER_S = 120.0


def in_group() -> bool:
    """Whether torch.distributed is initialized. Another thread may be in the midst of importing it."""
    is_initialized = getattr(sys.modules.get("torch.distributed"), "is_initialized", None)
    return is_initialized is not None and bool(is_initialized())


def may_join() -> bool:
    """Whether this process is a child of multiprocessing, in no group yet."""
    processes = sys.modules.get("multiprocessing.process")
    return processes is not None and processes.parent_process() is not None and not in_group()


class Joining:
    """Waits until this process knows its rank in the process group.

    The ranks of a job meet by three values. folder: where they meet. named: the run id that the user gave, or None.
    started: when this process started, in Unix milliseconds.
    """

    def __init__(self, folder: Path, named: str | None, started: int) -> None:
        self.folder, self.named, self.started = folder, named, started
        self._since = time.monotonic()

    def over(self, *, begun: bool) -> bool:
        """Whether there is nothing left to wait for. Never blocks. begun: the first step is over, or the run."""
        return in_group() or begun or time.monotonic() - self._since > ALONE_AFTER_S
