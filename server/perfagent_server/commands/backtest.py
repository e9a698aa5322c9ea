"""`perfagent backtest FILE|FOLDER|RUN ...`: what the rules would have found in runs that are over."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from perfagent.command_line.terminal_output import Screen, Table
from perfagent.errors import ConfigError, PerfagentError, ServerUnreachable
from perfagent.plural import some
from perfagent.recording import Recorded, read_recording, recorded_folders
from perfagent_server.backtest.curve_file import read_curve_file
from perfagent_server.backtest.moment import Moment
from perfagent_server.backtest.replay import Judged, replay
from perfagent_server.backtest.reported import Reported, in_order_of_time
from perfagent_server.backtest.server_run import read_server_run
from perfagent_server.commands.connection import AdminApi, NotThere, add_options
from perfagent_server.engine.rule_settings import ALL_PROJECTS, RulesFile, read_rules_file
from perfagent_server.rules.catalogue import rules_for
from perfagent_server.rules.plan import Plan

__all__ = ["command"]

_PRINTED = ("rule", "severity", "onset_step", "first_step", "last_step", "message")
_COLUMNS = "step, loss and any of lr, grad_norm, loss_scale, train_time_ms, step_time_s and names of the catalogue"


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Judges runs that are over with the rules of the server, step by step, and says what would have been found when. "
        f"A FILE is CSV with a row a step: {_COLUMNS}; an empty cell is absent, nan and inf are values. It may also be what "
        "`perfagent export RUN --format csv` wrote. A FOLDER holds such files, or a recording (`perfagent run --record`). "
        "A RUN is the id or the name of a run of the server."
    )
    parser.add_argument("sources", nargs="+", metavar="FILE|FOLDER|RUN")
    parser.add_argument(
        "--rules", type=Path, metavar="FILE",
        help="thresholds in place of the rules' own, in the format of the server's rules.toml",
    )  # fmt: skip
    add_options(parser)
    parser.set_defaults(run=_backtest)


@dataclass(frozen=True, slots=True)
class _Source:
    """A run to judge. moments: with the plan, because not every event is worth asking a server for. damaged: files of
    it that could not be read to their ends."""

    name: str
    project: str
    moments: Callable[[Plan], Iterator[Moment]]
    damaged: int = 0


class _Plans:
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


def _backtest(arguments: argparse.Namespace) -> int:
    plans = _Plans(arguments.rules)
    sources = [found for word in arguments.sources for found in _sources(word, arguments)]
    judged = []
    for source in sources:
        plan = plans.of(source.project)
        judged.append((source.name, replay(source.moments(plan), plan)))
    if arguments.json:
        print(json.dumps({"runs": [_plain(name, one) for name, one in judged]}))
    else:
        _show(Screen(), judged)
    troubles = [
        f"{source.name}: {some(source.damaged, 'file')} damaged; what is whole in it was judged"
        for source in sources
        if source.damaged
    ]
    failed = {what: error for _, one in judged for what, error in one.failed.items()}
    troubles += [
        f"{what} failed and was passed over: {type(error).__name__}: {error}" for what, error in failed.items()
    ]
    for trouble in troubles:
        sys.stderr.write(f"perfagent backtest: {trouble}\n")
    return 1 if troubles else 0


# ---- what the words mean


def _sources(word: str, arguments: argparse.Namespace) -> list[_Source]:
    """A file or a folder that is there, else a run of the server."""
    path = Path(word)
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return [_of_file(path)]
    if path.suffix == ".csv" or word.startswith(("/", "./", "../", "~")):  # a run may have a slash in its name
        raise ConfigError(f"there is no file or folder {word}")
    return [_of_server(word, arguments)]


def _of_file(path: Path) -> _Source:
    return _Source(str(path), "", lambda _: read_curve_file(path))


def _in_folder(folder: Path) -> list[_Source]:
    if recorded_folders(folder):
        return _recorded(folder)
    files = sorted(folder.glob("*.csv"))
    if not files:
        raise ConfigError(f"{folder} holds neither CSV files (*.csv) nor a recording of perfagent")
    return [_of_file(file) for file in files]


def _recorded(folder: Path) -> list[_Source]:
    runs: dict[str, list[Recorded]] = {}
    for one in read_recording(folder):
        runs.setdefault(one.run, []).append(one)
    return [
        _Source(
            str(folder) if len(runs) == 1 else f"{folder}: {run}",
            found[0].project,
            partial(_played, found=found),
            sum(one.damaged for one in found),
        )
        for run, found in runs.items()
    ]


def _played(_: Plan, found: Sequence[Recorded]) -> Iterator[Moment]:
    return in_order_of_time([Reported(one.attempt, one.rank, one.groups, one.events) for one in found])


def _of_server(name_or_id: str, arguments: argparse.Namespace) -> _Source:
    api = AdminApi.from_arguments(arguments)
    try:
        run = _found(api, name_or_id)
    except ServerUnreachable as error:
        raise ServerUnreachable(f"there is no file or folder {name_or_id!r}, and as a run: {error}") from error
    return _Source(name_or_id, run["project"], lambda plan: read_server_run(api, run["run"], plan.on_event))


def _found(api: AdminApi, name_or_id: str) -> Any:
    """The run of that id, else the newest of that name."""
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


def _plain(name: str, judged: Judged) -> dict[str, Any]:
    alerts = [{field: getattr(alert, field) for field in _PRINTED} for alert in judged.alerts]
    return {"file": name, "steps": judged.steps, "alerts": alerts}


def _show(screen: Screen, judged: Sequence[tuple[str, Judged]]) -> None:
    for name, one in judged:
        alerts = some(len(one.alerts), "alert") if one.alerts else "no alert"
        screen.line(f"{name}: {some(one.steps, 'step')}, {alerts}")
        if one.alerts:
            rows = [
                (
                    alert.severity, alert.rule, f"{alert.onset_step:,}", f"{alert.first_step:,}", f"{alert.last_step:,}",
                    alert.message,
                )
                for alert in one.alerts
            ]  # fmt: skip
            head = ("SEVERITY", "RULE", "ONSET", "FIRED", "LAST", "MESSAGE")
            screen.table(Table(head, rows, right=(2, 3, 4), indent=2, narrow=(5,)))
    if len(judged) > 1:
        steps = sum(one.steps for _, one in judged)
        severities = [alert.severity for _, one in judged for alert in one.alerts]
        remarks = severities.count("info")
        screen.line(
            f"{some(len(judged), 'run')}, {some(steps, 'step')}: {some(len(severities) - remarks, 'alert')} at warning or "
            f"above, {some(remarks, 'remark')}"
        )
