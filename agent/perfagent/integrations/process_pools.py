"""multiprocessing.Pool: a training in a worker ends with the task that attached it.

A pool ends its workers by SIGTERM, also when all work is done (`with Pool()` and `terminate()`). Nothing can run in a
worker then, so its run would be lost. A run that the pool's `initializer` attached has no such end.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from perfagent.boundary.guard import guarded

__all__ = ["end_with_task"]


@guarded
def end_with_task(finish: Callable[[str], None]) -> None:
    """Calls finish(state) just before the worker sends the result of the task that calls this; nothing elsewhere."""
    worker = _worker_in_task()
    writer = worker and getattr(worker.f_locals["outqueue"], "_writer", None)  # None: a pool of threads
    if worker is None or writer is None:
        return
    send = writer.send_bytes

    @guarded
    def end() -> None:
        finish("finished" if worker.f_locals["result"][0] else "failed")

    def send_after_end(*result: Any) -> None:
        writer.send_bytes = send
        end()
        send(*result)

    writer.send_bytes = send_after_end


def _worker_in_task() -> FrameType | None:
    pools = sys.modules.get("multiprocessing.pool")
    frame = sys._getframe() if pools is not None else None
    while frame is not None and frame.f_code is not pools.worker.__code__:  # type: ignore[union-attr]
        frame = frame.f_back
    return frame if frame is not None and "completed" in frame.f_locals else None  # set after the initializer's call
