"""Reports what every thread of this process is doing, also while the training thread hangs in C: Python stacks, and what
the kernel says that a thread waits in. No local variable is read, and no lock taken that another thread may hold.
"""

from __future__ import annotations

import linecache
import sys
import threading
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import CodeType, FrameType, TracebackType

from perfagent.wire.evidence import ThreadStack

__all__ = ["OWN", "all_stacks", "frames_of"]

MOST_THREADS = 256
MOST_FRAMES = 64
OWN = ("perfagent-sender", "perfagent-courier")


def all_stacks(training: int) -> list[ThreadStack]:
    """The training thread first, whose ident is `training`; a frame is "file:line in function: source". Without the agent's
    own threads; of more than 256, the last entry counts those that are not shown."""
    # not threading.enumerate(): it takes a lock, which a thread that is being started may hold
    known: dict[int, threading.Thread] = dict(getattr(threading, "_active", {}))
    main = threading.main_thread().ident
    found: list[ThreadStack] = []
    left_out = 0
    # else newest first
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: (item[0] != training, item[0] != main)):
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
            if thread.native_id:
                entry |= _kernel(thread.native_id)
        found.append(entry)
    found.sort(key=lambda entry: (not entry["training"], not entry["main"], entry["name"]))
    if left_out:
        more = f"... {left_out} more threads"
        found.append({"name": more, "thread": 0, "main": False, "training": False, "frames": []})
    return found


def _frames(frame: FrameType) -> list[str]:
    walked = [*walk_stack(frame)]
    left_out = [f"... {len(walked) - MOST_FRAMES} more"] if len(walked) > MOST_FRAMES else []
    return [*left_out, *(_spelled(one.f_code, line) for one, line in walked[MOST_FRAMES - 1 :: -1])]


def frames_of(trace: TracebackType | None) -> list[str]:
    """Frames of an exception's traceback, the innermost last."""
    return [_spelled(frame.f_code, line) for frame, line in [*walk_tb(trace)][-MOST_FRAMES:]]


def _spelled(code: CodeType, number: int | None) -> str:
    line = number or 0  # None where an instruction belongs to no line, as in code that was generated
    source = linecache.getline(code.co_filename, line).strip()[:200]
    return f"{code.co_filename}:{line} in {code.co_qualname}" + (f": {source}" if source else "")


def _kernel(native: int) -> ThreadStack:
    """State of a thread (R runs, S sleeps, D waits for a disk or device), and the kernel function in which it waits."""
    task = Path("/proc/self/task") / str(native)
    found: ThreadStack = {}
    try:
        found["state"] = (task / "stat").read_text().rpartition(")")[2].split()[0]
        waits_in = (task / "wchan").read_text().strip()
    except (OSError, IndexError):
        return found
    if waits_in and waits_in != "0":
        found["waits_in"] = waits_in
    return found
