"""Runs one program under a tool, watches what the tool says meanwhile and after the end, and records it all.

The record is plain data: judging.py judges it, now or later.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil
from builders import job_environment
from sick.batches import Program
from sick.expectations import Expectation
from sick.judging import is_accepted
from sick.tools import Said, Tool

__all__ = ["Record", "StoppedError", "run_program", "stopping"]

Record = dict[str, Any]

LOOKS_EVERY_S = 0.5
STAYS_S = 8.0  # a program that need not end goes on so long after its alert: the tool may say more, stacks for example
SETTLES_S = 45.0  # after the end of the program, until the tool knows it
LAST_LOOKS = 4  # after the tool knows it
QUITS_WITHIN_S = 45.0  # the launcher, after the training processes were killed
LEAVES_WITHIN_S = 10.0  # what the program left behind, such as a watcher that still sends how it ended
LINES_KEPT = 12
MARK = "SICK_PROGRAM"
"""A variable of all processes of a program, by which they are found, and nobody else's."""
_ORDER = ("info", "warning", "critical")

stopping = threading.Event()
"""Set by whoever wants the programs of all threads to end now."""


class StoppedError(Exception):
    """The suite is being stopped: the program was ended, and there is no record."""


def run_program(program: Program, tool: Tool, folder: Path) -> Record:
    """folder: a new one. Raises StoppedError."""
    folder.mkdir(parents=True)
    mark = f"{os.getpid()}-{folder}"
    try:
        return _record(program, tool, folder, mark)
    finally:
        _kill(_processes(mark))


def _record(program: Program, tool: Tool, folder: Path, mark: str) -> Record:
    load, began, watch = os.getloadavg()[0], time.time(), Watch(tool, program.run)
    with (folder / "output").open("w+b") as output:
        process = _start(program, tool, folder, output, mark)
        cut = watch.until_it_ends(process, program.expected, began)
        wall_s, live, alerts_live = time.time() - began, _plain(watch.said), watch.worst()
        if cut:
            _kill(one for one in _processes(mark) if _trains(one))  # the watcher stays, to send how it ended
        code = _exit_code(process, mark)
        watch.until_it_is_known()
        left = _left_behind(mark)
        lines = _lines(output)
    return {
        "batch": program.batch, "program": program.name, "code": code, "cut": cut, "wall_s": round(wall_s, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)], "live": live, "ended": _plain(watch.said),
        "alerts_live": alerts_live, "alerts": watch.worst(), "trail": watch.trail, "truths": _truths(lines),
        "left_behind": left, "output": lines[-LINES_KEPT:],
    }  # fmt: skip


@dataclasses.dataclass
class Watch:
    """What a tool said of a run so far. alerts: each as bad as it ever was, in its newest words, with the time at which
    it was first seen; trail: each change of verdict or state."""

    tool: Tool
    run: str
    said: Said | None = None
    alerts: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    trail: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def look(self) -> None:
        said = self.tool.said(self.run)
        if said is None:
            return
        self.said, now = said, time.time()
        for alert in said.alerts:
            key = f"{alert['rule']}:{alert.get('id')}"
            before = self.alerts.get(key)
            if before is None or _ORDER.index(alert["severity"]) >= _ORDER.index(before["severity"]):
                self.alerts[key] = {**alert, "first_seen": before["first_seen"] if before else now}
        change = {"verdict": said.verdict.get("rule"), "severity": said.verdict.get("severity"), "state": said.state}
        if not self.trail or change.items() - self.trail[-1].items():
            words = said.verdict.get("message")
            self.trail.append({"time": round(now, 1), "step": said.step, **change, "message": words})

    def worst(self) -> list[dict[str, Any]]:
        return [*self.alerts.values()]

    def until_it_ends(self, process: subprocess.Popen[bytes], expected: Expectation, began: float) -> bool:
        """Whether it must be ended: at its limit, or soon after its alert where nothing else is to come."""
        until, is_named = began + expected.limit_s, False
        while process.poll() is None:
            self.look()
            if expected.judge == "live" and not is_named and any(is_accepted(one, expected) for one in self.worst()):
                until, is_named = min(until, time.time() + STAYS_S), True
            if time.time() > until:
                self.look()
                return True
            _pause()
        return False

    def until_it_is_known(self) -> None:
        """That the run ended; and what is said then."""
        until = time.monotonic() + SETTLES_S
        self.look()
        while time.monotonic() < until and (self.said is None or not self.said.end):
            _pause()
            self.look()
        for _ in range(LAST_LOOKS):
            _pause()
            self.look()


def _pause() -> None:
    if stopping.wait(LOOKS_EVERY_S):
        raise StoppedError


# ---- processes


def _start(program: Program, tool: Tool, folder: Path, output: IO[bytes], mark: str) -> subprocess.Popen[bytes]:
    """Its standard input stays open and empty: the demo's job goes on for as long as somebody is there."""
    command = tool.command(program.words, program.run)
    if program.expected.processes > 1:
        ranks = "--standalone", "--nproc-per-node", str(program.expected.processes)
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, "--no-python", *command]
    variables = job_environment(folder, OMP_NUM_THREADS="1", **tool.environment(), **{MARK: mark})
    variables.pop("PYTHONPATH", None)  # the folders of our scripts
    return subprocess.Popen(
        command, cwd=folder, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def _processes(mark: str) -> list[psutil.Process]:
    """Those that live and have our mark: only what this program started does."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def _trains(process: psutil.Process) -> bool:
    with suppress(OSError):
        return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


def _kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.kill()


def _exit_code(process: subprocess.Popen[bytes], mark: str) -> int:
    try:
        code = process.wait(QUITS_WITHIN_S)
    except subprocess.TimeoutExpired:
        _kill(_processes(mark))
        code = process.wait()
    if process.stdin is not None:
        process.stdin.close()
    return code


def _left_behind(mark: str) -> int:
    """How many processes are there after the time that they have."""
    until = time.monotonic() + LEAVES_WITHIN_S
    while (left := _processes(mark)) and time.monotonic() < until:
        _pause()
    return len(left)


# ---- what it printed, and what the tool said, as plain data


def _lines(output: IO[bytes]) -> list[str]:
    output.seek(0)
    return output.read().decode("utf-8", "replace").splitlines()


def _truths(lines: Iterable[str]) -> list[dict[str, Any]]:
    """What a program knows of itself: `TRUTH {"onset": 1764412345.6, "step": 300}`."""
    truths = []
    for line in lines:
        _, mark, told = line.partition("TRUTH ")
        with suppress(ValueError):
            truths += [json.loads(told)] if mark else []
    return truths


def _plain(said: Said | None) -> dict[str, Any]:
    """Empty for a run that the tool does not know."""
    return {} if said is None else dataclasses.asdict(said) | {"alerts": None}
