"""What the agent costs, as far as it is counted and not measured: two reads of a clock cost as much as a hook does.

The unit is a stamp: one tuple with the time in it, appended. What a stamp takes is measured once in each process, on the
sender's thread; how many of them a hook is worth comes from benchmarks/overhead/timing.py, which measures whole loops. A hook in
the middle of a training step finds cold caches: there it costs about three times what it costs in a loop of its own.
"""

from __future__ import annotations

import time
from collections import deque

__all__ = ["clips_ns", "log_ns", "rare_ns", "stamp_ns", "steps_ns", "telling_ns"]

_STEP, _ENTRY = 60, 48
"""Stamps that completing a step is worth, and each entry of its trace."""
_RARE, _SCALED = 200, 130
"""The same of what only some steps leave behind (clipping, mixed precision, a pass), and of a GradScaler's step besides."""
_CLIP, _CLIPPED = 250, 6
"""The same of a call that clips, and each of its gradients: by their identities it is known what was clipped."""
_LOG, _VALUE = 45, 4
"""Stamps that a log() call is worth, and each of its values."""
_LOG_AGAIN, _VALUE_AGAIN = 10, 0.5
"""The same of a call right behind another one, which finds all that it needs in the caches."""
_TOLD, _LAYER = 3000, 10
"""Stamps that telling one measured step is worth, on the sender's thread, and each of its layers: it has series that the steps
before and after it do not have. Measured as the CPU of that thread with a pass in every tenth step, and with none."""
_BLOCKS, _STAMPS = 9, 100
_USUAL_NS = 100.0
_measured_ns = 0.0


def stamp_ns() -> float:
    """Nanoseconds of CPU that one stamp takes on this machine; measured at the first call, which takes 0.2 ms."""
    global _measured_ns
    if not _measured_ns:
        _measured_ns = min(_block_ns() for _ in range(_BLOCKS))  # the least: whatever else ran only adds
    return _measured_ns


def _block_ns() -> float:
    noted: deque[tuple[int, int, None]] = deque(maxlen=_STAMPS)
    now = time.perf_counter_ns
    began = time.thread_time_ns()
    for _ in range(_STAMPS):
        noted.append((0, now(), None))
    return max(1.0, (time.thread_time_ns() - began) / _STAMPS)


def steps_ns(steps: int, entries: int) -> float:
    """Of so many steps with so many entries in their traces in all."""
    return stamp_ns() * (_STEP * steps + _ENTRY * entries)


def rare_ns(*, scaled: bool) -> float:
    """Of what one step leaves behind that not every step does. scaled: by a GradScaler."""
    return stamp_ns() * (_RARE + _SCALED * scaled)


def clips_ns(calls: int, gradients: int) -> float:
    """Of so many calls that clip so many gradients in all."""
    return stamp_ns() * (_CLIP * calls + _CLIPPED * gradients)


def log_ns(calls: int, values: int, again: int = 0, values_again: int = 0) -> float:
    """Of so many log() calls with so many values in all, and of so many that came right behind another one."""
    return stamp_ns() * (_LOG * calls + _VALUE * values + _LOG_AGAIN * again + _VALUE_AGAIN * values_again)


def telling_ns(layers: int) -> float:
    """Of telling what a pass over the gradients of so many layers found. Measures nothing: it is asked for between two steps."""
    return (_measured_ns or _USUAL_NS) * (_TOLD + _LAYER * layers)
