"""What `perfagent run` says about a script that made no step and started other processes: a driver of several trainings,
or a script that forks its training. Those are not recorded, so the run must not look as if all were well.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection
from pathlib import Path

__all__ = ["pythons_below", "started_here", "unrecorded"]


def started_here() -> int:
    """How many processes this one has started by multiprocessing. Imports nothing."""
    counter = getattr(sys.modules.get("multiprocessing.process"), "_process_counter", None)
    number = repr(counter).removeprefix("count(").removesuffix(")")
    return int(number) - 1 if number.isdigit() else 0


def pythons_below(pid: int, proc: Path = Path("/proc")) -> set[int]:
    """The Python processes that a process has started and that run now."""
    found = set()
    try:
        for thread in (proc / str(pid) / "task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                with contextlib.suppress(OSError):  # it has ended
                    if os.readlink(proc / child / "exe").rpartition("/")[2].startswith("python"):  # noqa: PTH115
                        found.add(int(child))
    except OSError:  # the process has ended, or the kernel does not tell
        pass
    return found


def unrecorded(number: int, failed: Collection[str] = ()) -> dict[str, object]:
    """The alert, of which the server makes sentences. failed: how those ended of which it is known that they failed."""
    level = "warning" if failed else "info"  # they may be workers of an evaluation
    return {"level": level, "unrecorded": number, "failed": len(failed), "ended": sorted(set(failed))[:5]}
