"""`perfagent diagnose PATH|URI|RUN ...`: judges finished runs with the rules, from the files of any tracker or trainer."""

from __future__ import annotations

import argparse
import errno
import json
import sys
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from perfagent.command_line.option_types import add_server_options
from perfagent.command_line.terminal_output import Screen
from perfagent.errors import ConfigError, PerfagentError, ResourceError, ServerUnreachable
from perfagent.wire.quantities import some
from perfagent_client.history import find_runs, of_database
from perfagent_server.backtest.server_run import read_server_run
from perfagent_server.diagnosis.judging import Diagnosis, diagnose, of_moments
from perfagent_server.diagnosis.reports import as_json, as_junit, as_sarif, worth_telling
from perfagent_server.engine.rules_file import ALL_PROJECTS, RulesFile, read_rules_file
from perfagent_server.rules.catalogue import rules_for
from perfagent_server.rules.plan import Plan

if TYPE_CHECKING:
    from perfagent_client.history.old_run import OldRun, Source
    from perfagent_server.commands.connection import AdminApi

__all__ = ["Plans", "command", "diagnosed", "found_on_server", "is_path", "own_trouble_is_no_finding", "runs_in"]

_FOUND, _COULD_NOT_JUDGE = 1, 3
_MOST_REMARKS, _FEW_RULES = 3, 2
_STYLES = {"info": "", "warning": "yellow", "critical": "bold red"}
_KNOWN = (
    "files of TensorBoard, W&B, MLflow, trackio and Neptune; trainer_state.json; CSV and JSON lines with a column of steps; "
    "printed logs; recordings and exports of perfagent"
)


def command(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Diagnoses runs in files and folders, without a server. For each run, it prints the problem, the evidence and the fix. "
        f"Formats: {_KNOWN}. Exit code: 0 nothing found, 1 a finding, 2 wrong use, 3 some run could not be judged."
    )
    parser.add_argument(
        "sources", nargs="+", metavar="PATH|URI|RUN",
        help="files, folders, a database of MLflow (postgresql://...), or runs of your server by id or name",
    )  # fmt: skip
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
    with own_trouble_is_no_finding():
        plans = Plans(arguments.rules)
        judged, troubles = _of_words(arguments, plans)
        if arguments.json:
            print(json.dumps(as_json(judged), ensure_ascii=False))
        else:
            _show(Screen(), judged)
        _write(arguments.sarif, as_sarif(judged) if arguments.sarif else "")
        _write(arguments.junit, as_junit(judged) if arguments.junit else "")
    failed = {what: error for one in judged for what, error in one.failed.items()}
    for what, error in failed.items():
        _complain(f"{what} failed and was passed over: {type(error).__name__}: {error}")
    outcomes = {one.outcome for one in judged}
    if "finding" in outcomes:
        return _FOUND
    return _COULD_NOT_JUDGE if troubles or "could not judge" in outcomes else 0


@contextmanager
def own_trouble_is_no_finding() -> Iterator[None]:
    """No server, a damaged file, a missing package: exit code 1 would say that a run is ill, or the new one worse."""
    try:
        yield
    except PerfagentError as error:
        if error.exit_code == _FOUND:
            error.exit_code = _COULD_NOT_JUDGE
        raise


def _write(file: Path | None, text: str) -> None:
    if file is None:
        return
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise ResourceError(f"{file} cannot be written ({error.strerror or error})") from error


def _complain(sentence: str) -> None:
    sys.stderr.write(f"perfagent diagnose: {sentence}\n")


# ---- what the words mean


def _of_words(arguments: argparse.Namespace, plans: Plans) -> tuple[list[Diagnosis], int]:
    """All that can be judged, and how often something could not be read, which is said at once."""
    paths = {word for word in arguments.sources if "://" not in word and is_path(word)}
    judged: list[Diagnosis] = []
    troubles = 0

    def trouble(sentence: str) -> None:
        nonlocal troubles
        troubles += 1
        _complain(sentence)

    for word in arguments.sources:
        before = len(judged) + troubles
        try:
            if word in paths:
                judged += diagnosed(find_runs([Path(word).expanduser()], _complain), plans, trouble)
            elif "://" in word:
                judged += diagnosed([of_database(word)], plans, trouble, _without_password(word))
            else:
                judged.append(_of_server(word, arguments, plans))
        except PerfagentError as error:
            if error.exit_code == ConfigError.exit_code or len(arguments.sources) == 1:
                raise
            trouble(str(error))
        if before == len(judged) + troubles:
            trouble(f"found no run in {word}; known formats: {_KNOWN}")
    return judged, troubles


def is_path(word: str) -> bool:
    """Whether it names a file or a folder, and not a run of the server. Raises ConfigError where it looks like one that is not
    there: a run may have a slash in its name."""
    path = Path(word).expanduser()
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        if path.suffix or word.startswith(("/", "./", "../", "~", ".\\")):
            raise ConfigError(f"there is no file or folder {word}") from None
        return False
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    return True


def _without_password(uri: str) -> str:
    scheme, _, rest = uri.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def diagnosed(
    sources: Iterable[Source], plans: Plans, trouble: Callable[[str], None], place: str = ""
) -> Iterator[Diagnosis]:
    """Of each run, one after the other: only one is in memory. trouble: called with what cannot be read, and why; place: of
    sources without files."""
    for source in sources:
        where = place or str(source.paths[0])
        try:
            for run in source.read():
                found = diagnose(run, plans.of(run.project))
                found.format, found.path = source.format, where
                yield found
        except OSError as error:
            trouble(f"{error.filename or where} cannot be read ({error.strerror or error})")
        except ResourceError as error:
            trouble(f"{where}: {error}")


def runs_in(path: Path) -> list[OldRun]:
    """All runs of a file or a folder. Raises ResourceError for what cannot be read."""
    try:
        return [run for source in find_runs([path]) for run in source.read()]
    except OSError as error:
        raise ResourceError(f"{error.filename or path} cannot be read ({error.strerror or error})") from error


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
    lacking = Counter(subject for one in judged for subject in one.unjudged)
    shared = {subject: count for subject, count in lacking.most_common() if count > 1}
    for one in judged:
        _show_run(screen, one, shared)
    for count, subjects in groupby(shared, key=shared.__getitem__):
        rules = {subject: {rule: 0 for one in judged for rule in one.unjudged.get(subject, [])} for subject in subjects}
        runs = f"all {count} runs" if count == len(judged) else f"{count} of the runs"
        _say(screen, f"Not judged in {_without_data(runs, rules)}", indent=0)
    if len(judged) > 1:
        outcomes = [one.outcome for one in judged]
        screen.line(
            f"{some(len(judged), 'run')}: {outcomes.count('finding')} with findings, {outcomes.count('nothing found')} without, "
            f"{outcomes.count('could not judge')} not judged"
        )


def _without_data(whose: str, rules: Mapping[str, Iterable[str]]) -> str:
    """rules: subject -> the rules that had no data; they are named where only some of a subject lacked something."""
    subjects = ((subject, [*its]) for subject, its in rules.items())
    told = (f"{subject} ({', '.join(its)})" if len(its) <= _FEW_RULES else subject for subject, its in subjects)
    return f"{whose}, for want of data: {'; '.join(told)}."


def _show_run(screen: Screen, one: Diagnosis, shared: Container[str]) -> None:
    """shared: what other runs lack as well, which is said once for all."""
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
    if own := {subject: rules for subject, rules in one.unjudged.items() if subject not in shared}:
        _say(screen, f"Not judged{_without_data('', own)}")
    for sentence in one.left_out:
        _say(screen, f"Left out: {sentence}.")


def _say(screen: Screen, text: str, indent: int = 4) -> None:
    for line in screen.wrapped(text, indent=indent):
        screen.line(line)
