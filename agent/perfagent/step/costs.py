"""Estimates what the agent costs by counting, not by measuring: reading a clock twice costs as much as a hook does.

The unit is a stamp: appending one tuple that holds the time. Each process measures the cost of a stamp once, on the
sender's thread; how many stamps a hook is worth comes from benchmarks/overhead/timing.py, which measures whole loops.
"""

from __future__ import annotations

import time
from collections import deque

__all__ = ["clips_ns", "log_ns", "occasional_ns", "report_ns", "stamp_ns", "steps_ns"]

_STEP, _ENTRY = 60, 48
"""Stamps for completing a step, and for each entry of its trace."""
_RARE, _SCALED = 200, 130
"""Stamps for what only some steps have (clipping, mixed precision, a pass), and the extra stamps for a
GradScaler's step."""
_CLIP, _CLIPPED = 250, 6
"""Stamps for a call that clips, and for each of its gradients."""
_LOG, _VALUE = 45, 4
"""Stamps for a log() call, and for each of its values."""
_LOG_AGAIN, _VALUE_AGAIN = 10, 0.5
"""Stamps for a log() call right after another one, and for each of its values: all that it needs is in the caches."""
_TOLD, _LAYER = 3000, 10
"""Stamps for reporting one measured step on the sender's thread, and for each of its layers. (0.3 ms: on small models more
than the pass itself, so it is charged to the pass that is planned.)"""
_BLOCKS, _STAMPS = 9, 100
_USUAL_NS = 100.0
_measured_ns = 0.0


def stamp_ns() -> float:
    """Returns the nanoseconds of CPU that one stamp takes on this machine. The first call measures that, in 0.2 ms."""
    global _measured_ns
    if not _measured_ns:
        _measured_ns = min(_block_ns() for _ in range(_BLOCKS))  # the minimum: other work only adds time
    return _measured_ns


def _block_ns() -> float:
    noted: deque[tuple[int, int, None]] = deque(maxlen=_STAMPS)
    now = time.perf_counter_ns
    began = time.thread_time_ns()
    for _ in range(_STAMPS):
        noted.append((0, now(), None))
    return max(1.0, (time.thread_time_ns() - began) / _STAMPS)


def steps_ns(steps: int, entries: int) -> float:
    """Returns the cost of `steps` steps with `entries` trace entries in total."""
    return stamp_ns() * (_STEP * steps + _ENTRY * entries)


def occasional_ns(*, scaled: bool) -> float:
    """Cost of the optional parts of a step: clipping, mixed precision, a gradient pass. scaled: a GradScaler stepped."""
    return stamp_ns() * (_RARE + _SCALED * scaled)


def clips_ns(calls: int, gradients: int) -> float:
    """Returns the cost of `calls` calls that clip `gradients` gradients in total."""
    return stamp_ns() * (_CLIP * calls + _CLIPPED * gradients)


def log_ns(calls: int, values: int, again: int = 0, values_again: int = 0) -> float:
    """Returns the cost of `calls` log() calls with `values` values in total, and of `again` calls right
    after another one."""
    return stamp_ns() * (_LOG * calls + _VALUE * values + _LOG_AGAIN * again + _VALUE_AGAIN * values_again)


def report_ns(layers: int) -> float:
    """Returns the cost of reporting a pass over the gradients of so many layers. Never measures, since it is called
    between two steps."""
    return (_measured_ns or _USUAL_NS) * (_TOLD + _LAYER * layers)
