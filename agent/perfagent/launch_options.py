"""The options of `perfagent run`, handed from the command to the process that it becomes.

Light: read at interpreter start-up.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["VARIABLE", "LaunchOptions", "current", "parents_run", "read"]

VARIABLE = "PERFAGENT_RUN_LAUNCH"


@dataclass(kw_only=True)
class LaunchOptions:
    """pid: of the process that was launched (exec keeps it); its children are none of our business, except the workers
    of a launcher. python_path: PYTHONPATH as it was before. watched: a watcher waits for the end of this process."""

    pid: int
    python_path: str | None = None
    launcher: bool = False
    watched: bool = False
    project: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    record: str | None = None
    run_id: str | None = None
    drawn_id: str | None = None
    """A run id that was drawn beforehand, so that watcher and trainer agree on it; one that the user gives later
    wins."""

    def for_session(self) -> dict[str, Any]:
        """Arguments of session.start_from_launcher: what was given, nothing for what was not."""
        given = {
            "project": self.project,
            "name": self.name,
            "tags": self.tags,
            "record": self.record,
            "run_id": self.run_id or self.drawn_id,
        }
        return {key: value for key, value in given.items() if value}

    def text(self) -> str:
        return json.dumps(asdict(self))


current: LaunchOptions | None = None
"""Set in a process that `perfagent run` started."""


def parents_run() -> str | None:
    """The run id of the launched process that spawned this one; None without one. A spawned process that joins a
    process group is a rank of that run."""
    text = getattr(sys.modules.get("perfagent.launch.children"), "told", None)
    told = read(text) if text else None
    return (told.run_id or told.drawn_id) if told is not None else None


def read(text: str) -> LaunchOptions:
    values = json.loads(text)
    values["tags"] = tuple(values["tags"])
    return LaunchOptions(**values)
