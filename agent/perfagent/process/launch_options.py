"""The options of `perfagent run`, handed from the command to the process that it becomes.

Light: read at interpreter start-up.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

__all__ = ["NONE", "VARIABLE", "LaunchOptions", "Start", "current", "parents_start", "read"]

VARIABLE = "PERFAGENT_RUN_LAUNCH"


class Start(NamedTuple):
    """What `perfagent run` drew for one start of a job, so that watcher and trainer speak as one. run: an id that the
    user gives later wins. attempt: 0 where the ranks draw it. source: the trainer's; the watcher uses it before it."""

    run: str | None = None
    attempt: int = 0
    source: str = ""


_NO_START = Start()


@dataclass(kw_only=True)
class LaunchOptions:
    """pid: of the process that was launched (exec keeps it); its children are none of our business, except the workers
    of a launcher. workers_have: variables of which these have one; none where it is no launcher. watched: a watcher waits
    for the end of this process."""

    pid: int
    workers_have: tuple[str, ...] = ()
    watched: bool = False
    project: str | None = None
    name: str | None = None
    tags: tuple[str, ...] = ()
    record: str | None = None
    run_id: str | None = None
    start: Start = _NO_START

    def for_session(self) -> dict[str, Any]:
        """Arguments of session.start_from_launcher: what was given, nothing for what was not."""
        names = ("project", "name", "tags", "record", "run_id")
        return {name: value for name in names if (value := getattr(self, name))}

    def text(self) -> str:
        return json.dumps(asdict(self))


NONE = LaunchOptions(pid=0)
"""Options of a process that `perfagent run` did not start."""
current: LaunchOptions | None = None
"""Set in a process that `perfagent run` started."""


def parents_start() -> Start:
    """That of the launched process that spawned this one. A spawned process that joins a process group is a rank of
    that run."""
    text = getattr(sys.modules.get("perfagent.launch.children"), "options_text", None)
    options = read(text) if text else None
    return Start() if options is None else options.start._replace(source="")


def read(text: str) -> LaunchOptions:
    values = json.loads(text)
    values["tags"], values["start"] = tuple(values["tags"]), Start(*values["start"])
    return LaunchOptions(**values)
