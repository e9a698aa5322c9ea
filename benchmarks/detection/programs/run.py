"""Runs the sick and the healthy programs of strangers under `perfagent run` and compares the verdicts with what a good
engineer would say.

    PYTHONPATH=benchmarks:tests python benchmarks/detection/programs/run.py [--only NAMES] [--jobs 2] [--limit-s 240] [--write]

Each program's docstring names its illness and the expected rules. The server and the jobs are real; the verdict is read
over HTTP, while a program runs and after it ended. A sick program is right when the verdict after its end, or else the
last one before it, is an expected one. A healthy program is right when nothing at warning or above was raised. --write
puts the results into docs/sick_programs.json: `verdict` and `right_now` are of this run, and `right_at_first_try` of a
program that is there already stays.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import tables
from builders import ServerProcess, job_environment

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[2] / "docs" / "sick_programs.json"
HEALTHY = "healthy"
RAISED = ("warning", "critical")
ENDED = ("lost", "finished", "failed", "oom", "killed", "preempted")
POLL_S = 2.0
SETTLES_S = 6.0  # the same verdict for so long after the end is the last one
ENDS_WITHIN_S = 60.0  # until the server knows that a run ended, and its verdict is settled
QUITS_WITHIN_S = 20.0  # after SIGTERM


@dataclass(frozen=True)
class Program:
    """launcher: what starts it instead of plain Python, as words."""

    path: Path
    illness: str
    expected: tuple[str, ...]
    launcher: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def healthy(self) -> bool:
        return self.expected == (HEALTHY,)

    def command(self) -> list[str]:
        watched = ["-m", "perfagent", "run", "--name", self.name, str(self.path)]
        if not self.launcher:
            return [sys.executable, *watched]
        assert self.launcher[0] == "torchrun", f"{self.name} is started by {self.launcher[0]!r}, not torchrun"
        return [sys.executable, "-m", "torch.distributed.run", *self.launcher[1:], *watched]


@dataclass
class Outcome:
    """live: the last two verdicts while the program ran; exit_code: None for one that was ended at the time limit."""

    program: Program
    live: list[str] = field(default_factory=list)
    after: str = "no run"
    severity: str = ""
    message: str = ""
    alerts: list[str] = field(default_factory=list)
    exit_code: int | None = None
    wall_s: float = 0.0

    @property
    def verdict(self) -> str:
        """The one that counts: after the end, unless only the last one before it was an expected one."""
        if self.after not in self.program.expected and self.live and self.live[-1] in self.program.expected:
            return self.live[-1]
        return self.after

    @property
    def right(self) -> bool:
        if self.program.healthy:
            return self.after != "no run" and self.severity not in RAISED and not self.alerts
        return self.verdict in self.program.expected


def read(path: Path) -> Program:
    """A program with what its docstring says about it. Raises ValueError for one that does not say it."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    found = re.findall(r"^(\w+): (.*(?:\n +.*)*)", text, re.MULTILINE)
    entries = {key: " ".join(value.split()) for key, value in found}
    if not {"Illness", "Expected"} <= entries.keys():
        raise ValueError(f"{path.name}: its docstring must have lines that begin with Illness: and Expected:")
    expected, launcher = tuple(entries["Expected"].split("|")), tuple(shlex.split(entries.get("Run", "")))
    return Program(path, entries["Illness"], expected, launcher)


def all_programs() -> list[Program]:
    return [read(path) for path in sorted(HERE.glob("*.py")) if path != Path(__file__).resolve()]


def execute(program: Program, server: ServerProcess, folder: Path, limit_s: float) -> Outcome:
    """Runs one program to its end or to the time limit."""
    outcome, work = Outcome(program), folder / program.name
    work.mkdir(parents=True)
    print(f"  {program.name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    with (work / "output.log").open("wb") as output:
        job = subprocess.Popen(
            program.command(), cwd=work, env=job_environment(work, PERFAGENT_SERVER=server.url), stdout=output,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        while job.poll() is None and time.monotonic() < began + limit_s:
            run = run_of(program, server)
            verdict = server.find(f"/runs/{run['run']}/verdict") if run else None
            if verdict and run and run["state"] not in ENDED:
                outcome.live = [*outcome.live[-1:], verdict["rule"]]
            time.sleep(POLL_S)
        outcome.exit_code = job.poll()
        end(job)
    outcome.wall_s = time.monotonic() - began
    judge_ended(outcome, server)
    print(f"  {program.name}: {outcome.verdict}, {outcome.wall_s:.0f} s", file=sys.stderr, flush=True)
    return outcome


def run_of(program: Program, server: ServerProcess) -> dict[str, Any] | None:
    found = server.find("/runs", name=program.name)
    return found["runs"][0] if found and found["runs"] else None


def end(job: subprocess.Popen[bytes]) -> None:
    """Ends what a program left: politely first, as a scheduler does."""
    left = psutil.Process(job.pid).children(recursive=True) if job.poll() is None else []
    if job.poll() is None:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.wait(QUITS_WITHIN_S)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
    for process in psutil.wait_procs(left, timeout=QUITS_WITHIN_S)[1]:
        process.kill()


def judge_ended(outcome: Outcome, server: ServerProcess) -> None:
    """Waits until the run ended and its verdict stays, and reads verdict and alerts."""
    give_up, same_since, verdict = time.monotonic() + ENDS_WITHIN_S, time.monotonic(), None
    while time.monotonic() < give_up and (verdict is None or time.monotonic() < same_since + SETTLES_S):
        time.sleep(POLL_S / 4)
        run = run_of(outcome.program, server)
        now = server.find(f"/runs/{run['run']}/verdict") if run and run["state"] in ENDED else None
        if now is None or verdict is None or now["rule"] != verdict["rule"]:
            same_since = time.monotonic()
        verdict = now or verdict
    run = run_of(outcome.program, server)
    if run is None:
        return
    verdict = verdict or server.get(f"/runs/{run['run']}/verdict")
    outcome.after, outcome.severity, outcome.message = verdict["rule"], verdict["severity"], verdict["message"]
    alerts = server.get(f"/runs/{run['run']}/alerts")["alerts"]
    raised = {alert["rule"] for alert in alerts if alert["severity"] in RAISED and alert["state"] != "pending"}
    outcome.alerts = sorted(raised)


def table(outcomes: list[Outcome]) -> str:
    head = ["program", "illness", "expected", "verdict", "right", "while it ran", "alerts", "s"]
    return tables.table(head, [_row(outcome) for outcome in outcomes])


def _row(outcome: Outcome) -> list[str]:
    program = outcome.program
    return [
        program.name, program.illness, "`" + " or ".join(program.expected) + "`", f"`{outcome.verdict}`",
        "yes" if outcome.right else "no", ", ".join(outcome.live), ", ".join(outcome.alerts), f"{outcome.wall_s:.0f}",
    ]  # fmt: skip


def write(outcomes: list[Outcome]) -> None:
    """Puts the results into the file: those of other programs stay, and so does how a first try went."""
    entries = {entry["program"]: entry for entry in json.loads(RESULTS.read_text("utf-8"))} if RESULTS.exists() else {}
    for outcome in outcomes:
        program = outcome.program
        first = entries.get(program.name, {}).get("right_at_first_try", outcome.right)
        entries[program.name] = {
            "program": program.name,
            "illness": program.illness,
            "expected": "|".join(program.expected),
            "verdict": outcome.verdict,
            "right_at_first_try": first,
            "right_now": outcome.right,
        }
    rows = [entries[name] for name in sorted(entries)]
    RESULTS.write_text(json.dumps(rows, indent=2, ensure_ascii=False) + "\n", "utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="programs by name, or by how their names begin")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=2, help="how many programs run at a time")
    parser.add_argument("--limit-s", type=float, default=240.0, help="a program that runs longer is ended")
    parser.add_argument("--write", action="store_true", help="put the results into docs/sick_programs.json")
    options = parser.parse_args()
    programs = all_programs()
    for begin in options.only or ():
        if not any(program.name.startswith(begin) for program in programs):
            parser.error(f"--only {begin}: no program begins with it; there are {', '.join(p.name for p in programs)}")
    chosen = [p for p in programs if not options.only or p.name.startswith(tuple(options.only))]
    with tempfile.TemporaryDirectory(prefix="perfagent-programs-") as name:
        folder = Path(name)
        server = ServerProcess(folder / "server", forked=False).start()
        try:
            with ThreadPoolExecutor(options.jobs) as pool:
                tries = [pool.submit(execute, p, server, folder / "jobs", options.limit_s) for p in chosen]
                outcomes = [attempt.result() for attempt in tries]
        finally:
            server.stop()
    print(table(outcomes))
    for outcome in outcomes:
        if not outcome.right:
            print(f"\n{outcome.program.name} (exit code {outcome.exit_code}): {outcome.verdict}: {outcome.message}")
    print(f"\n{sum(outcome.right for outcome in outcomes)} of {len(outcomes)} right")
    if options.write:
        write(outcomes)
    return 0 if all(outcome.right for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
