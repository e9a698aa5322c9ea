"""`perfagent import PATH|URI ...`: brings runs of any tracker or trainer into a server."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from perfagent.command_line.question import agreed, somebody_can_answer
from perfagent.command_line.terminal_output import Screen
from perfagent.errors import ConfigError, PerfagentError
from perfagent.plural import some
from perfagent_client.connection import add_options, administrator, print_json
from perfagent_client.history import OldRun, find_runs
from perfagent_client.history.mlflow_store import from_uri
from perfagent_client.history.old_run import Source
from perfagent_client.importing.following import Following
from perfagent_client.importing.importer import Importer, Report
from perfagent_server.diagnosis.judging import Diagnosis, diagnose
from perfagent_server.diagnosis.plans import ServerPlans
from perfagent_server.diagnosis.reports import as_findings

__all__ = ["command"]

_FOUND_NOTHING = 1
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
        "--follow", action="store_true", help="go on with what is added, until Ctrl-C; runs that go on are live"
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
    diagnoses: dict[str, Diagnosis] = field(default_factory=dict)

    def __call__(self, run: OldRun, project: str, written: float) -> list[dict[str, Any]]:
        found = diagnose(run, self.plans.of(project, run.tags))
        self.diagnoses[run.source] = found
        return as_findings(found, run, written)


def _bring(arguments: argparse.Namespace) -> int:
    client = administrator(arguments)
    judge = _Judge(ServerPlans(client, _say))
    told = _Told(Screen(), judge, is_quiet=arguments.json)
    importer = Importer(
        client, judge, told.run, project=arguments.project, group=arguments.group, words=arguments.sources, say=_say
    )
    sources = partial(_sources, arguments.sources)
    try:
        with client, importer:
            if arguments.follow:
                Following(importer, sources).run()
            else:
                importer.bring(sources(), is_live=lambda _run, _written: False)
                importer.finish()
    except KeyboardInterrupt:
        _say(
            f"interrupted; what was sent stays: {_taken_back(importer.import_id)} The same command again sends the rest."
        )
        return 0 if arguments.follow else 130
    told.sum_up(importer)
    return 0 if told.reports else _FOUND_NOTHING


def _sources(words: Iterable[str]) -> Iterator[Source]:
    for word in words:
        if "://" in word:
            yield Source("mlflow", (), partial(from_uri, word))
        else:
            yield from find_runs([Path(word).expanduser()])


@dataclass
class _Told:
    """Says what became of each run, when the server has it."""

    screen: Screen
    judge: _Judge
    is_quiet: bool
    reports: list[Report] = field(default_factory=list)

    def run(self, report: Report) -> None:
        self.reports.append(report)
        found = self.judge.diagnoses.pop(report.source, None)
        report.verdict = found.verdict.title or found.verdict.rule if found is not None else ""
        if self.is_quiet:
            return
        what = (
            f"{some(report.samples, 'sample')} ({report.format})"
            if report.samples
            else f"nothing new ({report.format})"
        )
        self.screen.line(f"{report.name}: {report.problem or what}", "yellow" if report.problem else "")
        if found is not None and found.outcome == "finding":
            self.screen.line(f"  {found.verdict.severity}  {report.verdict}", _STYLES.get(found.verdict.severity, ""))
        for sentence in report.left_out:
            self.screen.line(f"  left out: {sentence}")

    def sum_up(self, importer: Importer) -> None:
        new = [one for one in self.reports if one.samples]
        samples = sum(one.samples for one in new)
        if self.is_quiet:
            runs = [vars(one) for one in self.reports]
            print_json(
                {
                    "import": importer.import_id or None,
                    "runs": runs,
                    "samples": samples,
                    "rejected": dict(importer.rejected),
                }
            )
            return
        for reason, count in importer.rejected.items():
            _say(f"the server did not take {some(count, 'sample')}: {reason}")
        if not self.reports:
            _say("found no run; `perfagent import --help` lists what it reads")
            return
        self.screen.line(
            f"{some(len(self.reports), 'run')}, of which {len(new)} had something new: {some(samples, 'sample')}. "
            f"{_taken_back(importer.import_id)}"
        )


def _taken_back(import_id: str) -> str:
    return f"`perfagent import --undo {import_id}` takes it back." if import_id else ""


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
