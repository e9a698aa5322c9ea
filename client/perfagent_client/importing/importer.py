"""An import: reads runs, asks the server how far it has each, and sends the rest."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from perfagent.errors import ConfigError, ResourceError
from perfagent_client.client import Client
from perfagent_client.history.old_run import OldRun, Source
from perfagent_client.importing.frames import Destination, Finding, Outgoing, run_id
from perfagent_client.importing.sending import Behind, Sender

__all__ = ["Importer", "Judgment", "Report"]

_DEFAULT_PROJECT = "default"
_OURS = "perfagent:"


@dataclass(slots=True)
class Report:
    """What became of a run. samples: that were sent now; problem: why it was left out as a whole; verdict, severity: what is
    wrong with it, empty where nothing is."""

    source: str
    run: str
    name: str
    format: str
    samples: int = 0
    problem: str = ""
    left_out: list[str] = field(default_factory=list)
    verdict: str = ""
    severity: str = ""


@dataclass(frozen=True, slots=True)
class Judgment:
    findings: Sequence[Finding]
    verdict: str = ""
    severity: str = ""


Judge = Callable[[OldRun, str, float], Judgment]
"""A run, the project in which it is judged, and when its files were written -> what was found in it."""


class Importer:
    """judge: of the runs that have ended. tell: called with each run once the server has all of it. project, group: of all runs,
    where they are given. words: as the user named the sources. say: of trouble. imports: to which something was sent. unread:
    sources that could not be read."""

    def __init__(
        self, client: Client, judge: Judge, tell: Callable[[Report], None], *, import_id: str, project: str | None,
        group: str, words: Sequence[str], say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._client, self._judge, self._tell, self._say = client, judge, tell, say
        self._project, self._group, self._words = project, group, words
        self._sender = Sender(client.server, client.api_key, waits=lambda reason: say(f"{reason}; trying again"))
        self._behind = Behind()
        self._import_id, self._is_begun = import_id, False
        self.imports: set[str] = set()
        self._brought: set[str] = set()
        self.unread = 0

    @property
    def rejected(self) -> Counter[str]:
        """Reason -> samples that the server did not take."""
        return self._sender.rejected

    def bring(self, sources: Iterable[Source], *, is_live: Callable[[OldRun, float], bool]) -> None:
        """is_live: whether a run goes on, by it and the time at which its files were written. Raises PerfagentError."""
        for source in sources:
            written = max(map(_written, source.paths), default=time.time())
            try:
                for run in source.read():
                    self._bring(run, source.format, written, goes_on=is_live(run, written))
            except (OSError, ResourceError) as error:  # forbidden, gone, or a package that reads it is missing
                self.unread += 1
                what = source.paths[0] if source.paths else source.format
                self._say(f"{what} cannot be read ({getattr(error, 'strerror', None) or error})")

    def finish(self) -> None:
        """Waits until the server has it all."""
        self._behind.finish()

    def _bring(self, run: OldRun, format: str, written: float, *, goes_on: bool) -> None:  # noqa: A002 - as in Source
        project = self._project or run.project or _DEFAULT_PROJECT
        to = Destination("", project, self._group, format, written, live=goes_on)
        if (ident := run_id(run, project)) in self._brought:
            self._behind.finish()  # the server must first know what is on its way
        self._brought.add(ident)
        report = Report(run.source, ident, run.name, format, left_out=run.left_out)
        if run.source.startswith(_OURS) and self._known(run.source.removeprefix(_OURS)) is not None:
            report.problem = "is here already, from its agent or `perfagent sync`"
        elif (known := self._known(report.run)) is not None:
            if known["imported"] is None:
                raise ConfigError(f"the server has a run {report.run!r} that no import began")
            to.import_id, to.seq, to.taken = (known["imported"][name] for name in ("import_id", "seq", "taken"))
            to.live = known["imported"]["source"].startswith("follow-")
        if not report.problem:
            self._send(run, to, report, goes_on=goes_on and to.live)
        self._behind.do(partial(self._tell, report))

    def _send(self, run: OldRun, to: Destination, report: Report, *, goes_on: bool) -> None:
        outgoing = Outgoing(run, to, has_ended=not goes_on)
        if outgoing.is_complete:
            return
        to.import_id = to.import_id or self._begun()
        self.imports.add(to.import_id)
        report.samples = outgoing.samples

        def judged() -> Sequence[Finding]:
            found = self._judge(run, to.project, to.written)
            report.verdict, report.severity = found.verdict, found.severity
            return found.findings

        for frame in outgoing.frames(judged):
            self._behind.do(partial(self._sender.send, frame))

    def _known(self, run: str) -> dict[str, Any] | None:
        """What the server has of it; None of a run that is not there."""
        found = self._client.request("POST", "/imports/known", body={"runs": [run]})
        known: dict[str, Any] | None = found["runs"].get(run)
        return known

    def _begun(self) -> str:
        if not self._is_begun:
            origin = f"{socket.gethostname()}: {' '.join(map(_without_password, self._words))}"[:2000]
            self._client.request(
                "PUT", f"/imports/{self._import_id}", body={"project": self._project or "", "origin": origin}
            )
            self._is_begun = True
        return self._import_id

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._behind.close()
        self._sender.close()
        self._client.close()


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return time.time()


def _without_password(word: str) -> str:
    scheme, found, rest = word.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if found else str(Path(word).resolve())
