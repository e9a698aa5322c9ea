"""Runs Python scripts, each in a fork of a process that has imported torch and perfagent once: five seconds of the start of each.

For tests of what a script does, not of how it starts: what a script finds imported here, it would have imported itself.

As a program: a line of JSON in: {"arguments": [script, ...], "environments": [{...}, ...], "folder": ..., "pipes":
false}, a process for each environment; what process N says goes to out-N.txt and err-N.txt in the folder. A line of
JSON out: their exit codes. With pipes the first are named pipes, in-N.txt is one too, and their process ids come out
first. Ends at the end of its input.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

__all__ = ["Ended", "Running", "run", "started"]


@dataclass(frozen=True)
class Ended:
    """A process that has ended, as subprocess would tell it."""

    returncode: int
    stdout: str
    stderr: str


def run(
    arguments: list[str], folder: Path, environments: list[dict[str, str]], timeout_s: float = 150.0
) -> list[Ended]:
    """A process for each environment, all at once, to their ends. folder: where they work, and where their output is
    kept.

    What must be set before an interpreter starts is not: PYTHONHASHSEED and the like; OMP_NUM_THREADS is 1.
    Raises AssertionError with their output, and the stacks of their threads, when they do not end in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _asked(arguments=arguments, environments=environments, folder=str(folder)) as (job, answers):
        ready, _, _ = select.select([answers], [], [], timeout_s)
        if not ready:
            os.killpg(job.pid, signal.SIGUSR1)
            time.sleep(1.0)  # they write their stacks
        said = [
            tuple((folder / f"{stream}-{number}.txt").read_text("utf-8", "replace") for stream in ("out", "err"))
            for number in range(len(environments))
        ]
        if not ready:
            raise AssertionError(f"{arguments} did not end in {timeout_s:.0f} s:\n{said}")
        codes = json.loads(answers.readline())
    return [Ended(code, out, err) for code, (out, err) in zip(codes, said, strict=True)]


@dataclass
class Running:
    """A process that runs. stdin, stdout: what it reads, and what it says."""

    pid: int
    stdin: IO[str]
    stdout: IO[str]
    errors: Path
    _codes: Callable[[], list[int]]
    _number: int

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Its exit code, when all that were started with it have ended; fails the test after a minute."""
        return self._codes()[self._number]

    def communicate(self, text: str = "") -> Ended:
        """Writes the text and the end of the input, reads to the end, and waits."""
        with contextlib.suppress(BrokenPipeError):  # it has ended
            self.stdin.write(text)
            self.stdin.close()
        said = self.stdout.read()
        return Ended(self.wait(), said, self.errors.read_text("utf-8", "replace"))


@contextlib.contextmanager
def started(arguments: list[str], folder: Path, environments: list[dict[str, str]]) -> Iterator[list[Running]]:
    """A process for each environment, to which the test speaks while they run. What still runs in the end is killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(len(environments)):
        for stream in ("in", "out"):
            os.mkfifo(folder / f"{stream}-{number}.txt")
    children = []
    with contextlib.ExitStack() as stack:
        wanted = {"arguments": arguments, "environments": environments, "folder": str(folder), "pipes": True}
        _, answers = stack.enter_context(_asked(**wanted))
        pids = json.loads(answers.readline())

        @functools.cache
        def codes() -> list[int]:
            ready, _, _ = select.select([answers], [], [], 60.0)
            if not ready:
                raise AssertionError(f"{arguments} did not end")
            found: list[int] = json.loads(answers.readline())
            return found

        for number, pid in enumerate(pids):
            given, said = (
                (folder / f"{name}-{number}.txt").open(mode)  # closed below
                for name, mode in (("in", "w"), ("out", "r"))
            )
            stack.callback(_close, given, said)
            children.append(Running(pid, given, said, folder / f"err-{number}.txt", codes, number))
        try:
            yield children
        finally:
            if not codes.cache_info().currsize:
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                codes()


def _close(*pipes: IO[str]) -> None:
    for pipe in pipes:
        with contextlib.suppress(BrokenPipeError):  # what was written is read by nobody
            pipe.close()


@contextlib.contextmanager
def _asked(**wanted: Any) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """The process that forks, and where it answers. It is ended where an error, or a test's time limit, comes before the
    end of the answer: the next test would read the rest."""
    job = _job()
    assert job.stdin is not None
    assert job.stdout is not None
    try:
        print(json.dumps(wanted), file=job.stdin, flush=True)
        yield job, job.stdout
    except BaseException:
        _job.cache_clear()
        _end(job)
        raise


@functools.cache
def _job() -> subprocess.Popen[str]:
    """The process that forks, one for all tests of this one. Its threads are one, as torchrun has it: two ranks of two
    threads wait for each other's."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PERFAGENT_")}
    job = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    atexit.register(_end, job)
    return job


def _end(job: subprocess.Popen[str]) -> None:
    if job.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)  # and what it has forked
        job.communicate()


# ---- in the process that forks

PRELOADED = (
    "torch._dynamo",  # the first optimizer imports it
    "perfagent.delivery.send_loop", "perfagent.probes.scheduler", "perfagent.samplers.gpu.sampler",
    "perfagent_loop.checkpoint",
)  # fmt: skip
_names: list[dict[str, Any]] = []


def start(job: dict[str, Any], number: int) -> int:
    """In the fork this returns when the script has ended; the process is then to end as any does."""
    child = os.fork()
    if child:
        return child
    folder = Path(job["folder"])
    os.dup2(os.open(folder / f"in-{number}.txt" if job.get("pipes") else os.devnull, os.O_RDONLY), 0)
    for descriptor, stream in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{stream}-{number}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(job["environments"][number])
    faulthandler.enable()  # a crash in native code shows its stack
    faulthandler.register(signal.SIGUSR1)
    sys.argv = job["arguments"]
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    # As those of a script are, its names are kept until the interpreter ends: a process group that goes earlier may
    # wait for one that another rank has still to leave.
    _names.append(runpy.run_path(sys.argv[0], run_name="__main__"))
    sys.exit()


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # or each attach() looks through all of it for the model and the optimizer
    for line in sys.stdin:
        wanted = json.loads(line)
        children = [start(wanted, number) for number in range(len(wanted["environments"]))]
        if wanted.get("pipes"):
            print(json.dumps(children), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    main()
