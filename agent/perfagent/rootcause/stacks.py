"""Reports what every thread of this process is doing: Python stacks taken from the sender's thread, while the training
thread may hang.

A thread that waits in C for a lock, a socket or a collective has let go of the interpreter, so this thread runs; what
it waits in is asked of the kernel, where there is a /proc. Local variables are not read, and no lock is taken that
another thread may hold.
"""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

from perfagent.wire.evidence import ThreadStack

__all__ = ["OWN", "all_stacks", "frames_of"]

MOST_THREADS = 256
MOST_FRAMES = 64
OWN = ("perfagent-sender", "perfagent-courier")


def all_stacks(training: int) -> list[ThreadStack]:
    """The training thread first; a frame is "file:line in function: source". training: its ident. The agent's own threads
    are left out; of more than 256, the last entry counts those that are not shown."""
    # not threading.enumerate(): it takes a lock, which a thread that is being started may hold
    known: dict[int, Any] = dict(getattr(threading, "_active", {}))
    main = threading.main_thread().ident
    found: list[ThreadStack] = []
    left_out = 0
    # else newest first
    frames = sorted(sys._current_frames().items(), key=lambda item: (item[0] != training, item[0] != main))
    for ident, frame in frames:
        thread = known.get(ident)
        name = thread.name if thread is not None else f"thread {ident}"
        if name in OWN:
            continue
        if len(found) >= MOST_THREADS:
            left_out += 1
            continue
        entry: ThreadStack = {
            "name": name, "thread": ident, "main": ident == main, "training": ident == training, "frames": _frames(frame),
        }  # fmt: skip
        if thread is not None:
            entry["daemon"] = bool(thread.daemon)
        native = getattr(thread, "native_id", None)
        if native:
            entry |= _kernel(native)
        found.append(entry)
    found.sort(key=lambda entry: (not entry["training"], not entry["main"], entry["name"]))
    if left_out:
        found.append(
            {"name": f"... {left_out} more threads", "thread": 0, "main": False, "training": False, "frames": []}
        )
    return found


def _frames(frame: FrameType | None) -> list[str]:
    lines: list[str] = []
    left_out = 0
    while frame is not None:
        if len(lines) < MOST_FRAMES:
            lines.append(_spelled(frame.f_code, frame.f_lineno))
        else:
            left_out += 1
        frame = frame.f_back
    if left_out:
        lines.append(f"... {left_out} more")
    return lines[::-1]


def frames_of(trace: TracebackType | None) -> list[str]:
    """Of an exception's traceback; the innermost frame last."""
    lines: list[str] = []
    while trace is not None:
        lines.append(_spelled(trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return lines[-MOST_FRAMES:]


def _spelled(code: CodeType, number: int | None) -> str:
    line = number or 0  # None where an instruction belongs to no line, as in code that was generated
    source = linecache.getline(code.co_filename, line).strip()[:200]
    return f"{code.co_filename}:{line} in {code.co_qualname}" + (f": {source}" if source else "")


def _kernel(native: int) -> ThreadStack:
    """What the kernel says of a thread: R runs, S sleeps, D waits for a disk or device; and the kernel function it
    waits in."""
    task = Path("/proc/self/task") / str(native)
    told: ThreadStack = {}
    try:
        told["state"] = (task / "stat").read_text().rpartition(")")[2].split()[0]
        waits_in = (task / "wchan").read_text().strip()
    except (OSError, IndexError):
        return told
    if waits_in and waits_in != "0":
        told["waits_in"] = waits_in
    return told
