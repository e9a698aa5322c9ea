"""`perfagent import PATH|URI ...`: brings runs of any tracker or trainer into a server."""

from __future__ import annotations

import argparse
import shlex
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from perfagent.command_line.terminal_output import Screen, agreed, somebody_can_answer
from perfagent.errors import ConfigError, PerfagentError
from perfagent.wire.quantities import some
from perfagent_client.connection import add_options, administrator, print_json
from perfagent_client.history import OldRun, find_runs, of_database
from perfagent_client.history.old_run import Source
from perfagent_client.importing.following import Following
from perfagent_client.importing.importer import Importer, Judgment, Report
from perfagent_client.importing.processes import Done, in_processes
from perfagent_server.diagnosis.judging import diagnose
from perfagent_server.diagnosis.plans import ServerPlans
from perfagent_server.diagnosis.reports import as_findings

__all__ = ["command"]

_FAILED, _INTERRUPTED = 1, 130
_STYLES = {"warning": "yellow", "critical": "bold red"}


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Bring old runs into your server: TensorBoard, W&B, MLflow, trackio and Neptune files, trainer_state.json, CSV and JSON "
        "lines, what trainers print, perfagent's own recordings. Each run is judged as a whole; nobody is alerted of the past. "
        "The same command again adds only what is new."
    )
    parser.add_argument(
        "sources", nargs="*", metavar="PATH|URI", help="files, folders, or a database of MLflow (postgresql://...)"
    )
    parser.add_argument("--project", help="of all these runs; without it each keeps its own, or goes to `default`")
    parser.add_argument("--group", default="", help="of the runs that have none")
    parser.add_argument(
        "--follow", action="store_true", help="import what is added, until Ctrl-C; active runs are live"
    )
    parser.add_argument("--list", action="store_true", help="list the imports of the server")
    parser.add_argument("--undo", metavar="IMPORT", help="delete the runs that an import began")
    parser.add_argument("--yes", action="store_true", help="do not ask before --undo")
    add_options(parser)
    parser.set_defaults(run=_import)


def _import(arguments: argparse.Namespace) -> int:
    acts = [bool(arguments.sources), arguments.list, arguments.undo is not None]
    if sum(acts) != 1:
        raise ConfigError("give files, folders or a database of MLflow; or --list; or --undo IMPORT")
    if arguments.list:
        return _list(arguments)
    return _undo(arguments) if arguments.undo is not None else _bring(arguments)


# ---- bringing


@dataclass
class _Judge:
    """Judges each run by the rules of the server."""

    plans: ServerPlans

    def __call__(self, run: OldRun, project: str, written: float) -> Judgment:
        found = diagnose(run, self.plans.of(project, run.tags))
        verdict = found.verdict if found.outcome == "finding" else None
        findings = as_findings(found, run, written)
        return Judgment(findings, verdict.title or verdict.rule, verdict.severity) if verdict else Judgment(findings)


def _importer(arguments: argparse.Namespace, import_id: str, tell: Callable[[Report], None]) -> Importer:
    client = administrator(arguments)
    return Importer(
        client, _Judge(ServerPlans(client, _say)), tell, import_id=import_id, project=arguments.project,
        group=arguments.group, words=arguments.sources, say=_say,
    )  # fmt: skip


def _bring(arguments: argparse.Namespace) -> int:
    told = _Told(Screen(), is_quiet=arguments.json)
    import_id = f"im_{uuid.uuid4().hex[:12]}"
    try:
        if arguments.follow:
            with _importer(arguments, import_id, told.run) as importer:
                Following(importer, partial(_sources, arguments.sources)).run()
        in_processes(list(_sources(arguments.sources)), partial(_part, arguments, import_id), told.take)
    except KeyboardInterrupt:
        _say("interrupted; what was sent stays, and the same command again sends the rest")
        return 0 if arguments.follow else _INTERRUPTED
    told.sum_up()
    return 0 if told.reports and not told.unread else _FAILED


def _part(
    arguments: argparse.Namespace, import_id: str, sources: Sequence[Source], tell: Callable[[Report], None]
) -> Done:
    """Brings some of the sources, in a process of its own."""
    with _importer(arguments, import_id, tell) as importer:
        importer.bring(sources, is_live=lambda _run, _written: False)
        importer.finish()
        return Done(importer.imports, importer.rejected, importer.unread)


def _sources(words: Iterable[str]) -> Iterator[Source]:
    """Of all paths together: a run that two of them lead to is found once."""
    for uri in (word for word in words if "://" in word):
        yield of_database(uri)
    yield from find_runs([Path(word).expanduser() for word in words if "://" not in word], _say)


@dataclass
class _Told:
    """Says what became of each run, when the server has it."""

    screen: Screen
    is_quiet: bool
    reports: list[Report] = field(default_factory=list)
    imports: set[str] = field(default_factory=set)
    rejected: Counter[str] = field(default_factory=Counter)
    unread: int = 0

    def take(self, done: Report | Done) -> None:
        if isinstance(done, Report):
            self.run(done)
        else:
            self.imports |= done.imports
            self.rejected += done.rejected
            self.unread += done.unread

    def run(self, report: Report) -> None:
        self.reports.append(report)
        if self.is_quiet:
            return
        what = (
            f"{some(report.samples, 'sample')} ({report.format})"
            if report.samples
            else f"nothing new ({report.format})"
        )
        self.screen.line(f"{report.name}: {report.problem or what}", "yellow" if report.problem else "")
        if report.verdict:
            self.screen.line(f"  {report.severity}  {report.verdict}", _STYLES.get(report.severity, ""))
        for sentence in report.left_out:
            self.screen.line(f"  left out: {sentence}")

    def sum_up(self) -> None:
        new = [one for one in self.reports if one.samples]
        samples = sum(one.samples for one in new)
        if self.is_quiet:
            runs = [asdict(one) for one in self.reports]
            print_json(
                {"imports": sorted(self.imports), "runs": runs, "samples": samples, "rejected": dict(self.rejected)}
            )
            return
        for reason, count in self.rejected.items():
            _say(f"the server did not take {some(count, 'sample')}: {reason}")
        if not self.reports:
            _say("found no run; `perfagent import --help` lists what it reads")
            return
        undo = " and ".join(f"`perfagent import --undo {name}`" for name in sorted(self.imports))
        self.screen.line(
            f"{some(len(self.reports), 'run')}, {len(new) or 'none'} with something new: {some(samples, 'sample')}."
            + (f" {undo} takes back what it brought." if undo else "")
        )


# ---- lists, and taking back


def _list(arguments: argparse.Namespace) -> int:
    with administrator(arguments) as client:
        found = client.request("GET", "/imports")
    if arguments.json:
        print_json(found)
        return 0
    for one in found["imports"]:
        created = one["created"][:19].replace("T", " ")
        print(f"{one['id']}  {created}  {some(one['runs'], 'run')}  {one['origin']}  by {one['who']}")
    if not found["imports"]:
        print("no runs were imported; `perfagent import PATH` brings some")
    return 0


def _undo(arguments: argparse.Namespace) -> int:
    name = arguments.undo
    with administrator(arguments) as client:
        known = {one["id"]: one for one in client.request("GET", "/imports")["imports"]}
        if name not in known:
            raise PerfagentError(f"there is no import {name!r}; `perfagent import --list` lists them")
        what = f"{some(known[name]['runs'], 'run')} of {known[name]['origin']}"
        if not arguments.yes:
            if not somebody_can_answer():
                raise ConfigError(
                    f"nothing is deleted: there is no terminal to ask on; `perfagent import --undo {shlex.quote(name)} --yes` "
                    "deletes unasked"
                )
            if not agreed(f"delete {what}, with all that people wrote about them? There is no way back."):
                _say("nothing is deleted")
                return 1
        deleted, left = 0, 1
        while left:
            answer = client.request("DELETE", f"/imports/{name}")
            deleted, left = deleted + answer["deleted"], answer["left"]
    if arguments.json:
        print_json({"import": name, "deleted": deleted})
    else:
        print(f"{some(deleted, 'run')} deleted")
    return 0


def _say(sentence: str) -> None:
    sys.stderr.write(f"perfagent import: {sentence}\n")
