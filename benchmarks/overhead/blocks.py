"""Times a call in blocks: the mean CPU of the calling thread over CALLS calls in a row."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["CALLS", "block_us"]

CALLS = 200


def block_us(call: Callable[[], object]) -> float:
    """Microseconds a call."""
    begin = time.thread_time()
    for _ in range(CALLS):
        call()
    return (time.thread_time() - begin) / CALLS * 1e6
