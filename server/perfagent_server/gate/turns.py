"""Runs two commands in turn: SIGSTOP pauses one while the other trains for a block of steps, so that load on the machine affects
both equally. The order A B B A A B B A cancels slow drift."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import IO

import psutil

from perfagent.delivery.recording import Recorded, read_recording
from perfagent.errors import ConfigError, ResourceError

__all__ = ["Block", "Command", "Job", "in_turn"]

_FIRST_BLOCK_S = 1.0
"""While the commands import, and until it is known how long their steps take."""
_LEAST_BLOCK_S, _MOST_BLOCK_S = 0.3, 20.0
_STEPS_A_BLOCK = 10
_KNOWN_STEPS = 20
"""Of each command, before the length of a block is chosen."""
_END_S = 10.0
"""For a command to end after SIGTERM."""
_POLL_S = 0.05
_QUOTED = re.compile(r"""'[^']*'|\\.|"(?:\\.|[^"\\])*\"""")
_OF_SHELLS = re.compile(r"\|\||&&|[|&;<>`]|\$[\w({]")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, slots=True)
class Command:
    """words: as `perfagent run` takes them; folder: where; environment: what stands before them, as in `SEED=1 python x.py`."""

    words: tuple[str, ...]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str, folder: Path) -> Command:
        """Raises ConfigError for a text without a command or with more than one, and for a folder that is none."""
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"the command {text!r} cannot be read: {error}") from None
        if shell := _OF_SHELLS.search(_QUOTED.sub(_expanded, text)):
            raise ConfigError(
                f"the command {text!r} has {shell[0]!r} in it, which no shell reads here; give one command with its arguments, "
                "such as 'python train.py --steps 500', or a script that does the rest"
            )
        before = list(takewhile(_ASSIGNMENT.match, words))
        words = words[len(before) :]
        if not words:
            raise ConfigError("the command is empty; give one such as 'python train.py --steps 500'")
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}, in which the command {text!r} should run")
        return cls(tuple(words), folder, {name: value for name, _, value in (one.partition("=") for one in before)})

    @property
    def script(self) -> Path:
        """The file that it runs, as far as its words say it; else where that would be."""
        module = self.words.index("-m") + 1 if "-m" in self.words[:-1] else 0
        names = [self.words[module].replace(".", "/") + end for end in (".py", "/__main__.py")] if module else []
        names += self.words[1:]
        files = (self.folder / one for one in names if (self.folder / one).is_file())
        return next(files, self.folder / next((one for one in names if one.endswith(".py")), self.words[0]))

    def recorded_into(self, recording: Path) -> list[str]:
        python, *rest = self.words
        is_python = re.fullmatch(r"python[\d.]*", Path(python).name) is not None
        # A path names the Python of another environment; a bare name is this one, where perfagent is.
        interpreter = python if is_python and "/" in python else sys.executable
        return [interpreter, "-m", "perfagent", "run", "--record", str(recording), *(rest if is_python else self.words)]


def _expanded(quoted: re.Match[str]) -> str:
    """What a shell would still put in: between double quotes variables, and commands."""
    return "".join(re.findall(r"`|\$[\w({]", re.sub(r"\\.", "", quoted[0]))) if quoted[0][0] == '"' else ""


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch in which a command was not stopped. begin, end: Unix seconds; cpu_s: what its processes used of the processors,
    in user and in system mode; queued_s: how long its training thread could have gone on, but other threads had the processors
    (NaN where the kernel does not say)."""

    begin: float
    end: float
    cpu_s: float
    queued_s: float


@dataclass(slots=True)
class Job:
    """A command as it ran. exit_code: None where its time was over and it was ended. blocks: in the order of time. pairs: how
    many of the first blocks have one of the other command beside them."""

    command: Command
    folder: Path
    blocks: list[Block] = field(default_factory=list)
    pairs: int = 0
    exit_code: int | None = None
    _process: subprocess.Popen[bytes] | None = None
    _cpu_s: dict[int, float] = field(default_factory=dict)

    @property
    def recording(self) -> Path:
        return self.folder / "recording"

    def output(self, lines: int) -> list[str]:
        """The newest lines that it printed."""
        return (self.folder / "output.txt").read_text("utf-8", "replace").splitlines()[-lines:]

    def recorded(self) -> list[Recorded]:
        return read_recording(self.recording) if self.recording.is_dir() else []

    def training_s(self, moment: float) -> float:
        """How long it had trained by then: pauses count for nothing."""
        at = bisect_right([block.begin for block in self.blocks], moment)
        before = sum(block.end - block.begin for block in self.blocks[: max(0, at - 1)])
        return before + (min(moment, self.blocks[at - 1].end) - self.blocks[at - 1].begin if at else 0.0)

    def start(self, output: IO[bytes]) -> None:
        # Nothing of the caller's: the recording is for the gate, whatever server the environment names.
        own = {**os.environ, **self.command.environment}
        environment = {name: value for name, value in own.items() if name != "PERFAGENT_RECORD"}
        words = self.command.recorded_into(self.recording)
        try:
            self._process = subprocess.Popen(
                words, cwd=self.command.folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ResourceError(f"{words[0]} cannot be started: {error}") from error

    def has_ended(self) -> bool:
        assert self._process is not None
        if self.exit_code is None:
            self.exit_code = self._process.poll()
        return self.exit_code is not None

    def train(self, seconds: float) -> None:
        """One block; shorter where the command ends."""
        begin, cpu_s, queued_s = time.time(), self._used_s(), self._queued_s()
        until = time.monotonic() + seconds
        while not self.has_ended() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))
        end = time.time()
        self.blocks.append(Block(begin, end, self._used_s() - cpu_s, self._queued_s() - queued_s))

    def stop(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                process.suspend()

    def go_on(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def end(self) -> None:
        """With all its processes, politely at first."""
        tree = self._tree()
        self.go_on()
        for process in tree:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(tree, timeout=_END_S)[1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if self._process is not None:
            self._process.wait()

    def _tree(self) -> list[psutil.Process]:
        """Parents before their children, which they can then no longer grow in number."""
        if self._process is None or self._process.returncode is not None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.Error:
            return []

    def _used_s(self) -> float:
        for process in self._tree():
            with contextlib.suppress(psutil.Error):
                used = process.cpu_times()
                self._cpu_s[process.pid] = used.user + used.system
        return sum(self._cpu_s.values())  # of those that have ended, too

    def _queued_s(self) -> float:
        """Of the main thread of the process that has computed most (https://docs.kernel.org/scheduler/sched-stats.html: the
        second figure of schedstat, in nanoseconds)."""
        pid = max(self._cpu_s, key=lambda one: self._cpu_s[one], default=0)
        try:
            return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text("ascii").split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return math.nan


def in_turn(
    commands: Sequence[Command], scratch: Path, most_s: float, say: Callable[[str], None] = lambda _: None
) -> list[Job]:
    """Both until their ends, or until `most_s` seconds are over; the recordings lie in `scratch`. When one of them ends, the
    other goes on alone."""
    jobs = [Job(command, scratch / name) for command, name in zip(commands, ("base", "new"), strict=True)]
    with _sigterm_raises(), contextlib.ExitStack() as started:
        for job in jobs:
            job.folder.mkdir()
            job.start(started.enter_context((job.folder / "output.txt").open("wb")))
            started.callback(job.end)
            job.stop()
        until = time.monotonic() + most_s
        _pairs(jobs, until, say)
        for job in jobs:
            job.go_on()
            while not job.has_ended() and time.monotonic() < until:
                job.train(min(_FIRST_BLOCK_S, until - time.monotonic()))
            job.stop()
    return jobs


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """A CI job that is cancelled must not leave a command behind that stands still for ever."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _pairs(jobs: Sequence[Job], until: float, say: Callable[[str], None]) -> None:
    block_s, known = _FIRST_BLOCK_S, False
    running: Job | None = None
    for order in _orders(jobs):
        for job in order:
            if job is not running:
                if running is not None:
                    running.stop()
                job.go_on()
                running = job
            job.train(block_s)
        if any(job.has_ended() for job in jobs) or time.monotonic() >= until:
            break
        for job in jobs:
            job.pairs += 1
        if not known and (step_s := _step_s(jobs)):
            block_s, known = min(max(_STEPS_A_BLOCK * step_s, _LEAST_BLOCK_S), _MOST_BLOCK_S), True
            say(f"a step takes about {step_s:.3g} s: blocks of {block_s:.3g} s in turn")
    for job in jobs:
        job.stop()


def _orders(jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
    while True:
        yield jobs
        yield jobs[::-1]


def _step_s(jobs: Sequence[Job]) -> float:
    """Of the slower one; 0 until both have made some steps."""
    found = []
    for job in jobs:
        ends = sorted(time for one in job.recorded()[:1] for group in one.groups if "step_time_s" in group.values
                      for time in group.times())  # fmt: skip
        if len(ends) < _KNOWN_STEPS:
            return 0.0
        half = ends[-_KNOWN_STEPS // 2 :]  # the first ones warm up
        found.append((job.training_s(half[-1]) - job.training_s(half[0])) / (len(half) - 1))
    return max(found)
