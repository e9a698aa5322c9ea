"""What watches the programs: Perfagent, or another tool that a file of yours describes (README.md)."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from builders import ServerProcess

__all__ = ["Finding", "Perfagent", "Said", "Tool", "tool_of"]

Finding = Mapping[str, Any]
"""rule: an id of docs/reference/rules.md, or "healthy"; severity: info, warning or critical; message: words for people. Where the
tool knows them: id, which tells two alerts of a rule apart, evidence, fix, ranks and since_step."""


@dataclass(frozen=True)
class Said:
    """What a tool says of a run at one moment. state: in its own words; end: whether it knows that the run ended."""

    state: str
    end: bool
    step: int | None = None
    verdict: Finding = field(default_factory=dict)
    alerts: Sequence[Finding] = ()
    findings: Sequence[Finding] = ()


class Tool(ABC):
    """Started once for each batch, in an empty folder of its own. Programs may run at the same time."""

    name: str

    @abstractmethod
    def start(self, folder: Path) -> None:
        """What must be there before the first program."""

    @abstractmethod
    def stop(self) -> None:
        """After the last program; also where start() failed."""

    @abstractmethod
    def command(self, words: Sequence[str], run: str) -> list[str]:
        """Starts `python *words` under the tool as a run of that name. torchrun starts it for each of several ranks."""

    @abstractmethod
    def said(self, run: str) -> Said | None:
        """What it says now; None for a run that it does not know yet."""

    def environment(self) -> dict[str, str]:
        """Variables that the programs need."""
        return {}


class Perfagent(Tool):
    """`perfagent up`, `perfagent run`, and what people read over HTTP."""

    name = "perfagent"
    _server: ServerProcess

    def start(self, folder: Path) -> None:
        self._server = ServerProcess(folder, forked=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def command(self, words: Sequence[str], run: str) -> list[str]:
        return [sys.executable, "-m", "perfagent", "run", "--project", "sick", "--name", run, *words]

    def said(self, run: str) -> Said | None:
        listed = self._server.find("/runs", name=run)
        if not listed or not listed["runs"]:
            return None
        path = f"/runs/{listed['runs'][0]['run']}"
        about, verdict, alerts, findings = (
            self._server.find(f"{path}{part}") for part in ("", "/verdict", "/alerts", "/findings")
        )
        if None in (about, verdict, alerts, findings):
            return None
        return Said(
            state=about["state"], end=about["state"] not in ("starting", "running", "stuck"), step=about["step"],
            verdict=verdict, alerts=[one for one in alerts["alerts"] if one["state"] != "pending"],
            findings=findings["findings"],
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        return {"PERFAGENT_SERVER": self._server.url}


def tool_of(file: Path) -> Tool:
    """The one subclass of Tool that a file has. Raises ValueError for none, or several."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{file} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    found = [one for one in vars(module).values() if inspect.isclass(one) and one.__module__ == file.stem]
    tools = [one for one in found if issubclass(one, Tool)]
    if len(tools) != 1:
        raise ValueError(f"{file} has {len(tools)} subclasses of sick.tools.Tool; it must have one")
    return tools[0]()
