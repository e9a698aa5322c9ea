"""`perfagent wait RUN --until finding,step=N,end`: for scripts and CI. The exit code says what came: 0 the step or a
good end, 3 a finding at warning or above or a critical verdict at the end, 4 a bad end, 1 no server or the time is over,
2 wrong use."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perfagent.command_line.option_types import number_above
from perfagent.command_line.terminal_output import Screen
from perfagent.errors import PerfagentError
from perfagent.wire import BAD_ENDS, Finding
from perfagent_client.client import Client
from perfagent_client.connection import add_options, add_run, found, print_json, reader
from perfagent_client.models import RunDetails
from perfagent_client.polling import ENDED, Patience

__all__ = ["Outcome", "Until", "first_of", "until_of", "wait"]

POLL_S = 0.5
SETTLE_S = 3.0
"""So long after the end a finding about the last steps may still come: the rules judge behind what arrives."""
VERDICT_S = 30.0
"""So long after the end a verdict is waited for: a busy server settles it later, and a gate must not pass a NaN."""
_FINDING, _BAD_END, _TIME_OVER = 3, 4, 1
_OF_THE_END = ("process_crash", "oom_observed", "lost_contact")
"""Rules that say no more than that the run ended badly."""


@dataclass(frozen=True, slots=True)
class Until:
    finding: bool = False
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """what: finding, step or end; or timeout. words: for people."""

    what: str
    code: int
    words: str
    finding: Finding | None = None


def wait(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Waits for a run, and says by its exit code what came first. The end of the run always ends the waiting."
    )
    parser.epilog = (
        "exit codes: 0 the step was reached, or the run finished and its verdict is not critical; 3 --until finding and "
        "one at warning or above came, or the run finished and its verdict is critical; 4 the run ended badly "
        f"({', '.join(BAD_ENDS)}); 1 no server, no such run, or --timeout is over; 2 wrong use"
    )
    add_run(parser)
    until = parser.add_argument(
        "--until", type=until_of, default=Until(), metavar="WHAT",
        help="finding, step=N and end, separated by commas: whatever comes first (default end)",
    )  # fmt: skip
    until.completer = lambda **_: ("finding", "step=", "end", "finding,end")  # type: ignore[attr-defined] # for argcomplete
    parser.add_argument(
        "--timeout", type=number_above(0), metavar="S", help="give up after so many seconds (exit code 1)"
    )
    add_options(parser)
    parser.set_defaults(run=_wait)


def until_of(text: str) -> Until:
    """Raises ArgumentTypeError."""
    words = text.split(",")
    steps = [word.removeprefix("step=") for word in words if word.startswith("step=")]
    wrong = [word for word in words if word not in ("finding", "end") and not word.startswith("step=")]
    if wrong or len(steps) > 1 or any(not step.isdecimal() for step in steps):
        raise argparse.ArgumentTypeError(f"is {text!r}; allowed are finding, step=N and end, separated by commas")
    return Until("finding" in words, int(steps[0]) if steps else None)


def _wait(arguments: argparse.Namespace) -> int:
    with reader(arguments) as client:
        run = found(client, arguments.name_or_id)
        screen = None if arguments.json else Screen()
        if screen is not None:
            screen.line(f"{run.name} ({run.run}) is {run.state}, at step {run.step:,}")
        outcome = _wait_for(client, run, arguments.until, arguments.timeout, screen)
        latest = client.run(run.run) if outcome.what != "timeout" else run
    if arguments.json:
        print_json(_as_json(outcome, latest))
    elif outcome.what == "timeout":
        raise PerfagentError(outcome.words)
    elif screen is not None:
        for line in screen.wrapped(outcome.words, 0, 4):
            screen.line(line)
    return outcome.code


def _as_json(outcome: Outcome, run: RunDetails) -> dict[str, Any]:
    return {
        "run": run.run, "name": run.name, "what": outcome.what, "exit_code": outcome.code, "state": run.state, "step": run.step,
        "message": outcome.words, "finding": outcome.finding,
    }  # fmt: skip


def _wait_for(client: Client, run: RunDetails, until: Until, timeout_s: float | None, screen: Screen | None) -> Outcome:
    if screen is None or until.step is None:
        return first_of(client, run, until, timeout_s)
    with screen.progress("step", until.step) as bar:
        return first_of(client, run, until, timeout_s, lambda latest: bar.move(latest.step, latest.state))


def first_of(
    client: Client,
    run: RunDetails,
    until: Until,
    timeout_s: float | None,
    show: Callable[[RunDetails], None] = lambda _: None,
) -> Outcome:
    """Whatever comes first. show: gets the run at each look."""
    patience = Patience()
    over = None if timeout_s is None else time.monotonic() + timeout_s
    ended_at: float | None = None
    while True:
        # Before the findings: what was said before the end is among them.
        latest = patience.ask(lambda: client.run(run.run))
        findings = patience.ask(lambda: client.findings(run.run)) if until.finding else []
        show(latest)
        ended = latest.state in ENDED
        ended_at = time.monotonic() if ended and ended_at is None else ended_at if ended else None
        judged_to_the_end = any(finding.rule in _OF_THE_END for finding in findings)
        waited_s = 0.0 if ended_at is None else time.monotonic() - ended_at
        settled = not until.finding or judged_to_the_end or waited_s >= SETTLE_S
        settled = settled and (_has_verdict(latest) or waited_s >= VERDICT_S)
        verdict = patience.ask(lambda: client.verdict(run.run)) if settled and latest.state == "finished" else None
        outcome = _judged(latest, findings, until, verdict, settled=settled)
        if outcome is not None:
            return outcome
        if over is not None and time.monotonic() >= over:
            words = f"{timeout_s:g} s are over: {run.name} is {latest.state}, at step {latest.step:,}; wait longer with --timeout"
            return Outcome("timeout", _TIME_OVER, words)
        time.sleep(POLL_S)


def _has_verdict(run: RunDetails) -> bool:
    """Whether a run that has ended was judged to its end, or its verdict decides nothing."""
    return run.state in BAD_ENDS or run.step == 0 or run.severity != "unknown"


def _judged(
    run: RunDetails, findings: list[Finding], until: Until, verdict: Finding | None, *, settled: bool
) -> Outcome | None:
    """Why the wait is over; None while it goes on. verdict: the verdict of a finished run. settled: whether an ended run can
    get no more findings."""
    bad = run.state in BAD_ENDS
    for finding in findings:
        if finding.severity != "info" and not (bad and finding.rule in _OF_THE_END):
            return Outcome("finding", _FINDING, f"[{finding.severity}] {finding.rule}: {finding.message}", finding)
    if until.step is not None and run.step >= until.step:
        return Outcome("step", 0, f"{run.name} has done step {until.step:,}, and is at step {run.step:,}")
    if run.state not in ENDED or not settled:
        return None
    before = f", before step {until.step:,}" if until.step is not None else ""
    why = f": {run.reason}" if run.reason else ""
    what = "lost contact" if run.state == "lost" else f"ended ({run.state})"
    words = f"{run.name} {what} at step {run.step:,}{before}{why}"
    if verdict is None or verdict.rule == "healthy":
        return Outcome("end", _BAD_END if bad else 0, words)
    code = _FINDING if verdict.severity == "critical" else 0
    return Outcome("end", code, f"{words}; verdict: [{verdict.severity}] {verdict.rule}: {verdict.message}", verdict)
