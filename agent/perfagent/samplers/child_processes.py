"""What `perfagent run` says about a script that made no step and started other processes: a driver of several trainings,
or a script that forks its training. Those are not recorded, so the run must not look as if all were well.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

__all__ = ["pythons_below", "started_here", "words"]


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
                if os.readlink(proc / child / "exe").rpartition("/")[2].startswith("python"):  # noqa: PTH115
                    found.add(int(child))
    except OSError:  # it has ended, or the kernel does not tell
        pass
    return found


def words(number: int) -> dict[str, Any]:
    """The alert."""
    what = "another process" if number == 1 else f"{number} other processes"
    return {
        "level": "info",  # they may be workers of an evaluation
        "title": f"This process made no optimizer step, and started {what}",
        "text": (
            "perfagent run records the process that it starts, and does not see how another one ends. If another one trains, "
            "put `perfagent run` before its command, or call perfagent.attach() in the function that trains."
        ),
    }
