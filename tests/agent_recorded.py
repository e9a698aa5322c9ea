"""Reads what a process recorded into its PERFAGENT_RECORD folder."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from perfagent.delivery.spool import Spool
from perfagent_server.event_data import event_problem


class Recording:
    """Everything below a record folder. Works on a copy, since reading a spool takes its frames away."""

    def __init__(self, folder: Path) -> None:
        self._frames: list[Any] = []
        with tempfile.TemporaryDirectory() as copy:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            for source in sorted(Path(copy).iterdir()):
                spool = Spool.open(source, recording=True)
                while (outgoing := spool.next()) is not None:
                    self._frames.append(outgoing)
                    spool.ack(outgoing.seq)
                spool.abandon()
        wrong = [
            (event, problem) for frame in self._frames for event in frame.events if (problem := event_problem(event))
        ]
        assert not wrong, f"the server would not take what the agent sends: {wrong}"

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value), by step."""
        groups = [group for frame in self._frames for group in frame.groups if name in group.values]
        return sorted(pair for group in groups for pair in zip(group.steps(), group.column(name), strict=True))

    def frames(self) -> list[tuple[list[Any], list[Any]]]:
        """Groups and events of each frame."""
        return [(frame.groups, frame.events) for frame in self._frames]

    def names(self) -> set[str]:
        return {name for frame in self._frames for group in frame.groups for name in group.values}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.data for frame in self._frames for event in frame.events if event.kind == kind]
