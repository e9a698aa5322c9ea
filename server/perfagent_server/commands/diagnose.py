"""`perfagent diagnose PATH|RUN ...`: judges finished runs with the rules, from the files of any tracker or trainer."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from perfagent.command_line.server_options import add_server_options
from perfagent.command_line.terminal_output import Screen
from perfagent.errors import ConfigError, PerfagentError, ResourceError, ServerUnreachable
from perfagent.plural import some
from perfagent_client.history import find_runs
from perfagent_server.backtest.server_run import read_server_run
from perfagent_server.diagnosis.judging import Diagnosis, diagnose, of_moments
from perfagent_server.diagnosis.reports import as_json, as_junit, as_sarif, worth_telling
from perfagent_server.engine.rules_file import ALL_PROJECTS, RulesFile, read_rules_file
from perfagent_server.rules.catalogue import rules_for
from perfagent_server.rules.plan import Plan

if TYPE_CHECKING:
    from perfagent_client.history.old_run import OldRun
    from perfagent_server.commands.connection import AdminApi

__all__ = ["Plans", "command", "diagnosed", "found_on_server", "runs_in"]

_FOUND, _COULD_NOT_JUDGE = 1, 3
_MOST_REMARKS, _FEW_RULES = 3, 2
_STYLES = {"info": "", "warning": "yellow", "critical": "bold red"}
_KNOWN = (
    "it reads TensorBoard, W&B, MLflow, trackio and Neptune files, trainer_state.json, CSV and JSON lines with a column of "
    "steps, what trainers print, and perfagent's own recordings and exports"
)


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"Finds the runs in files and folders, and says of each what is wrong with it, how that shows and what to do: {_KNOWN}. "
        "Needs no server. A RUN is the id or the name of a run of your server. Exit code: 0 nothing found, 1 a finding, 3 could "
        "not judge, 2 wrong use."
    )
    parser.add_argument("sources", nargs="+", metavar="PATH|RUN")
    parser.add_argument(
        "--rules", type=Path, metavar="FILE",
        help="thresholds in place of the rules' own, in the format of the server's rules.toml",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--sarif", type=Path, metavar="FILE", help="write the findings as SARIF 2.1.0, for code hosts")
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="write a JUnit report with a test case a run, for CI"
    )
    add_server_options(parser)
    parser.set_defaults(run=_diagnose)


class Plans:
    """The rules of each project by the file of --rules; without a file, every rule with its own thresholds."""

    def __init__(self, file: Path | None) -> None:
        if file is not None and not file.is_file():
            raise ConfigError(
                f"--rules: there is no file {file}; it must be TOML with tables of rules, such as [loss_spike]"
            )
        self._settings = RulesFile() if file is None else read_rules_file(file)
        self._made: dict[str, Plan] = {}

    def of(self, project: str) -> Plan:
        if project not in self._made:
            settings = [self._settings.get(ALL_PROJECTS, {}), self._settings.get(project, {}) if project else {}]
            # What the tags of a run are, no file says: all of them judge.
            own = {one.name: one for one in self._settings.alerts if one.project in (ALL_PROJECTS, project)}
            self._made[project] = Plan([*rules_for(*settings), *own.values()])
        return self._made[project]


def _diagnose(arguments: argparse.Namespace) -> int:
    plans = Plans(arguments.rules)
    judged, nothing = [], []
    for word in arguments.sources:
        found = [*_of_word(word, arguments, plans)]
        judged += found
        if not found:
            nothing.append(word)
    if arguments.json:
        print(json.dumps(as_json(judged), ensure_ascii=False))
    else:
        _show(Screen(), judged)
    _write(arguments.sarif, as_sarif(judged) if arguments.sarif else "")
    _write(arguments.junit, as_junit(judged) if arguments.junit else "")
    _complain(judged, nothing)
    outcomes = {one.outcome for one in judged}
    if "finding" in outcomes:
        return _FOUND
    return _COULD_NOT_JUDGE if nothing or "could not judge" in outcomes else 0


def _write(file: Path | None, text: str) -> None:
    if file is None:
        return
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ResourceError(f"{file} cannot be written ({error.strerror or error})") from error


def _complain(judged: Sequence[Diagnosis], nothing: Sequence[str]) -> None:
    for word in nothing:
        sys.stderr.write(f"perfagent diagnose: found no run in {word}; {_KNOWN}\n")
    failed = {what: error for one in judged for what, error in one.failed.items()}
    for what, error in failed.items():
        sys.stderr.write(f"perfagent diagnose: {what} failed and was passed over: {type(error).__name__}: {error}\n")


# ---- what the words mean


def _of_word(word: str, arguments: argparse.Namespace, plans: Plans) -> Iterator[Diagnosis]:
    """Of a file or a folder that is there, else of a run of the server."""
    path = Path(word).expanduser()
    if path.exists():
        if not os.access(path, os.R_OK):
            raise ResourceError(f"{word} cannot be read: permission denied")
        yield from diagnosed([path], plans)
    elif path.suffix or word.startswith(("/", "./", "../", "~", ".\\")):  # a run may have a slash in its name
        raise ConfigError(f"there is no file or folder {word}")
    else:
        yield _of_server(word, arguments, plans)


def diagnosed(paths: Sequence[Path], plans: Plans) -> Iterator[Diagnosis]:
    """Of each run in files and folders, one after the other: only one is in memory."""
    for source in find_runs(paths):
        try:
            for run in source.read():
                found = diagnose(run, plans.of(run.project))
                found.format, found.path = source.format, str(source.paths[0])
                yield found
        except OSError as error:
            sys.stderr.write(f"perfagent diagnose: {source.paths[0]} cannot be read ({error.strerror or error})\n")


def runs_in(path: Path) -> list[OldRun]:
    """All runs of a file or a folder."""
    return [run for source in find_runs([path]) for run in source.read()]


def _of_server(name_or_id: str, arguments: argparse.Namespace, plans: Plans) -> Diagnosis:
    from perfagent_server.commands.connection import AdminApi

    api = AdminApi.from_arguments(arguments)
    try:
        run = found_on_server(api, name_or_id)
    except ServerUnreachable as error:
        raise ServerUnreachable(f"there is no file or folder {name_or_id!r}, and as a run: {error}") from error
    plan = plans.of(run["project"])
    found = of_moments(name_or_id, read_server_run(api, run["run"], plan.on_event), plan)
    found.format, found.source = "server", run["run"]
    return found


def found_on_server(api: AdminApi, name_or_id: str) -> Any:
    """The run of that id, else the newest of that name."""
    from perfagent_server.commands.connection import NotThere

    listed = api.request("GET", f"/runs?{urlencode({'name': name_or_id, 'limit': 1})}")["runs"]
    try:
        return api.request("GET", f"/runs/{quote(name_or_id, safe='')}")
    except NotThere:
        if listed:
            return listed[0]
    raise PerfagentError(
        f"there is no file, no folder and no run {name_or_id!r}; `perfagent runs` lists the runs of the server"
    )


# ---- what is said


def _show(screen: Screen, judged: Sequence[Diagnosis]) -> None:
    for one in judged:
        _show_run(screen, one)
    if len(judged) > 1:
        outcomes = [one.outcome for one in judged]
        screen.line(
            f"{some(len(judged), 'run')}: {outcomes.count('finding')} with findings, {outcomes.count('nothing found')} without, "
            f"{outcomes.count('could not judge')} not judged"
        )


def _show_run(screen: Screen, one: Diagnosis) -> None:
    screen.line(f"{one.name}: {some(one.steps, 'step')}" + (f" ({one.format}, {one.path})" if one.path else ""), "bold")
    told = worth_telling(one)
    for found in told:
        cause = f": {found.cause}" if found.cause else ""
        screen.line(f"  {found.severity}  {found.rule}{cause}", _STYLES[found.severity])
        _say(screen, found.message)
        if found.fix:
            _say(screen, f"Fix: {found.fix}")
    if one.outcome == "nothing found":
        _say(screen, one.verdict.message)
    elif not told:
        _say(
            screen,
            f"Could not judge it: it has too few losses, or none. {one.verdict.message if one.alerts else ''}".rstrip(),
        )
    known = {found.rule for found in told}
    remarks = [alert.message for alert in one.alerts if alert.severity == "info" and alert.rule not in known]
    for remark in remarks[:_MOST_REMARKS]:
        _say(screen, f"Remark: {remark}")
    if one.unjudged:
        _say(
            screen, f"Not judged, for its files do not have the data: {'; '.join(map(_subject, one.unjudged.items()))}."
        )
    for sentence in one.left_out:
        _say(screen, f"Left out: {sentence}.")


def _subject(entry: tuple[str, list[str]]) -> str:
    """With the rules where only some of a subject lacked something."""
    subject, rules = entry
    return f"{subject} ({', '.join(rules)})" if len(rules) <= _FEW_RULES else subject


def _say(screen: Screen, text: str) -> None:
    for line in screen.wrapped(text, indent=4):
        screen.line(line)
