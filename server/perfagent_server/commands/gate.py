"""`perfagent gate BASE NEW`: fails a build whose training is slower beyond noise, or sicker, than the one before."""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from perfagent.command_line.option_types import number_above
from perfagent.command_line.terminal_output import Screen
from perfagent.errors import ConfigError, ResourceError
from perfagent_server.backtest.replay import replay
from perfagent_server.backtest.reported import Reported, in_order_of_time
from perfagent_server.backtest.server_run import read_server_run
from perfagent_server.commands.connection import AdminApi, add_options
from perfagent_server.commands.diagnose import Plans, found_on_server, is_path, own_trouble_is_no_finding, runs_in
from perfagent_server.diagnosis.judging import Diagnosis, diagnose, of_moments
from perfagent_server.diagnosis.moments import moments as moments_of
from perfagent_server.gate import reports
from perfagent_server.gate.judgment import Judgment, as_if_never_stopped, judge, new_findings
from perfagent_server.gate.timing import Steps, apart, grown, paired
from perfagent_server.gate.turns import Command, Job, in_turn
from perfagent_server.rules.plan import Plan

__all__ = ["command"]

_OUTPUT_LINES = 20
"""Of a command that failed."""


def command(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "perfagent gate [options] BASE NEW\n"
        "       perfagent gate [options] --base-command CMD [--base-dir DIR] [--new-command CMD]"
    )
    parser.description = (
        "Says whether NEW is slower than BASE beyond noise, and which part of the step grew, or sicker: whether the rules find "
        "something at warning or above that BASE has not. BASE and NEW are runs of the server (id or name), recordings or CSV "
        "files. Or two commands are recorded here, in turn: one stands still while the other trains for a block of steps, so "
        "that a busy machine meets both alike. Findings about speed alone do not fail: the interval judges speed."
    )
    parser.epilog = (
        "exit codes: 0 neither slower nor sicker; 1 slower, sicker, or NEW failed; 2 wrong use; 3 cannot tell: too few steps, "
        "too much noise, or BASE failed"
    )
    parser.add_argument("sides", nargs="*", metavar="BASE NEW", help="RUN, FOLDER of a recording, or CSV FILE each")
    parser.add_argument(
        "--base-command", metavar="CMD",
        help="such as 'python train.py --steps 500', or 'SEED=1 python train.py'; no shell reads it",
    )  # fmt: skip
    parser.add_argument("--new-command", metavar="CMD", help="the same of NEW (default: the command of BASE)")
    parser.add_argument(
        "--base-dir", type=Path, default=Path(), metavar="DIR",
        help="where the command of BASE runs, such as a checkout of the main branch (default: here, as NEW does)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=number_above(0), default=150.0, metavar="S",
        help="end both commands after so many seconds altogether, and judge what they did (default 150)",
    )  # fmt: skip
    parser.add_argument(
        "--slower-than", type=_percent, default=0.03, metavar="PCT",
        help="how much longer a step must take to count, such as 5%% (default 3%%)",
    )  # fmt: skip
    parser.add_argument(
        "--confidence", type=_percent, default=0.99, metavar="PCT", help="of the interval, below 100%% (default 99%%)"
    )
    parser.add_argument(
        "--rules",
        type=Path,
        metavar="FILE",
        help="thresholds in place of the rules' own, as in the server's rules.toml",
    )
    for name, what in (
        ("markdown", "a summary, such as for $GITHUB_STEP_SUMMARY"),
        ("junit", "JUnit XML"),
        ("sarif", "SARIF"),
    ):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=f"also write {what}")
    add_options(parser)
    parser.set_defaults(run=_gate)


def _percent(text: str) -> float:
    """5% or 5 -> 0.05. Below 1 it must have its sign: 0.05 may mean 5 %."""
    number = re.fullmatch(r"(\d*\.?\d+)\s*(%?)", text.strip())
    if number is None or not 0 < float(number[1]) < 100:
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed is a percentage above 0 and below 100, such as 5%")
    if float(number[1]) < 1 and not number[2]:
        meant = f"{100 * float(number[1]):g}%"
        raise argparse.ArgumentTypeError(f"is {text!r}; write {meant}, or {number[1]}% if so little is meant")
    return float(number[1]) / 100


def _gate(arguments: argparse.Namespace) -> int:
    _check(arguments)
    with own_trouble_is_no_finding():
        plans = Plans(arguments.rules)
        judgment = _of_runs(arguments, plans) if arguments.sides else _of_commands(arguments, plans)
        _tell(judgment, arguments)
        _write(judgment, arguments)
    return judgment.exit_code


def _check(arguments: argparse.Namespace) -> None:
    of_commands = {"--base-command": arguments.base_command, "--new-command": arguments.new_command}
    given = [name for name, value in of_commands.items() if value is not None]
    if arguments.sides and (given or arguments.base_dir != Path()):
        raise ConfigError(
            f"both runs and {(given or ['--base-dir'])[0]} are given; give BASE and NEW, or --base-command"
        )
    if not arguments.base_command and len(arguments.sides) != 2:
        raise ConfigError(f"BASE and NEW are needed, or --base-command; {len(arguments.sides)} were given")
    for file in (arguments.markdown, arguments.junit, arguments.sarif):
        if file is not None and not file.absolute().parent.is_dir():
            raise ConfigError(f"there is no folder {file.absolute().parent} for {file.name}")


def _of_runs(arguments: argparse.Namespace, plans: Plans) -> Judgment:
    base, new = (_stored(word, arguments, plans) for word in arguments.sides)
    differences = apart(base.steps, new.steps, arguments.confidence)
    phases = grown(base.steps, new.steps)
    judgment = judge(differences, phases, arguments.slower_than, _untimed(base.steps, new.steps))
    sicker, slow = new_findings(base.found.alerts, new.found.alerts, new.plan)
    return replace(judgment, steps=(base.found.steps, new.found.steps), sicker=sicker, slow_rules=slow)


@dataclass(frozen=True, slots=True)
class _Stored:
    steps: Steps
    found: Diagnosis
    plan: Plan


def _stored(word: str, arguments: argparse.Namespace, plans: Plans) -> _Stored:
    """Of a file or a folder with one run, else of a run of the server."""
    if not is_path(word):
        api = AdminApi.from_arguments(arguments)
        run = found_on_server(api, word)
        plan = plans.of(run["project"])
        told = list(read_server_run(api, run["run"], plan.on_event))
        return _Stored(Steps.of(told), of_moments(word, told, plan), plan)
    runs = runs_in(Path(word).expanduser())
    if len(runs) != 1:
        raise ConfigError(f"{word} holds {len(runs)} runs; one is compared with one")
    plan = plans.of(runs[0].project)
    return _Stored(Steps.of(moments_of(runs[0], plan)), diagnose(runs[0], plan), plan)


def _of_commands(arguments: argparse.Namespace, plans: Plans) -> Judgment:
    commands = [
        Command.of(arguments.base_command, arguments.base_dir.absolute()),
        Command.of(arguments.new_command or arguments.base_command, Path.cwd()),
    ]
    with tempfile.TemporaryDirectory(prefix="perfagent-gate-") as scratch:
        jobs = in_turn(commands, Path(scratch), arguments.seconds, partial(_say, arguments))
        return _of_jobs(jobs, arguments, plans)


def _of_jobs(jobs: Sequence[Job], arguments: argparse.Namespace, plans: Plans) -> Judgment:
    plan = plans.of("")
    moments = [
        list(in_order_of_time([Reported(one.attempt, one.rank, one.groups, one.events) for one in job.recorded()]))
        for job in jobs
    ]
    base, new = (Steps.of(its) for its in moments)
    differences = paired((jobs[0].blocks, base), (jobs[1].blocks, new), jobs[0].pairs, arguments.confidence)
    phases = grown(base.whole(jobs[0].blocks), new.whole(jobs[1].blocks))
    judgment = judge(differences, phases, arguments.slower_than, _untimed(base, new))
    judged = [replay(as_if_never_stopped(its, job), plan) for its, job in zip(moments, jobs, strict=True)]
    sicker, slow = new_findings(judged[0].alerts, judged[1].alerts, plan)
    failed = [(name, job) for name, job in zip(("BASE", "NEW"), jobs, strict=True) if job.exit_code]
    broken = ""
    if failed:
        name, job = failed[0]  # that NEW fails as BASE does says nothing of NEW
        broken = f"{name} ended with exit code {job.exit_code}"
        for line in job.output(_OUTPUT_LINES):
            sys.stderr.write(f"{name}: {line}\n")
    return replace(
        judgment,
        steps=(judged[0].steps, judged[1].steps),
        sicker=sicker,
        slow_rules=slow,
        broken=broken,
        base_broken=broken.startswith("BASE"),
    )


def _untimed(base: Steps, new: Steps) -> list[str]:
    return [name for name, steps in (("BASE", base), ("NEW", new)) if not len(steps.seconds)]


def _new(arguments: argparse.Namespace) -> Path:
    """The file that NEW is, or runs."""
    if arguments.sides:
        return Path(arguments.sides[1]).expanduser()
    return Command.of(arguments.new_command or arguments.base_command, Path.cwd()).script


def _say(arguments: argparse.Namespace, text: str) -> None:
    if not arguments.json:
        sys.stderr.write(f"perfagent gate: {text}\n")


def _tell(judgment: Judgment, arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(reports.as_json(judgment)))
        return
    screen = Screen()
    for line in reports.lines(judgment, arguments.confidence):
        for part in screen.wrapped(line, 0, 2):
            screen.line(part)


def _write(judgment: Judgment, arguments: argparse.Namespace) -> None:
    """Raises ResourceError for a file that cannot be written."""
    confidence = arguments.confidence
    try:
        if arguments.markdown:
            with arguments.markdown.open("a", encoding="utf-8") as file:  # a job summary is added to
                file.write(reports.markdown(judgment, confidence))
        if arguments.junit:
            arguments.junit.write_text(reports.as_junit(judgment, confidence), "utf-8")
        if arguments.sarif:
            arguments.sarif.write_text(reports.as_sarif(judgment, confidence, str(_new(arguments))), "utf-8")
    except OSError as error:
        raise ResourceError(f"{error.filename} cannot be written ({error.strerror or error})") from error
