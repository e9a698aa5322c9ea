"""Tries mutants: each in a checkout, with the tests that touch its line, up to the first that fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mutants.rooms import Mutant, Placed
from mutants.touching import Case

__all__ = ["BUDGET_S", "Forker", "Result", "checkout", "environment", "options", "result", "try_all"]

# Of tests for one mutant, by their CPU time in the run of all: about three times that by the clock. Others are not run.
BUDGET_S = 20.0
_LEAST_CPU_S = 60.0  # to collect tests, and import what they test
_IN_PYTEST = Path(__file__).parent / "in_pytest"


@dataclass(frozen=True)
class Result:
    """What became of a mutant: `killed`, `late` (so is what hangs), `survived`, `untouched` by any test, `gone` with its line.

    by: the test that killed it; ran, left_out: how many tests touch the line, and how many of these took too long."""

    id: str
    room: str
    file: str
    function: str
    text: str
    operator: str
    nth: int
    line: int
    ended: str
    by: str = ""
    ran: int = 0
    left_out: int = 0
    took_s: float = 0.0

    @property
    def killed(self) -> bool:
        return self.ended in {"killed", "late"}


@contextlib.contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A temporary worktree of the commit."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        path = Path(folder).resolve() / "checkout"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(path), commit], check=True)
        try:
            yield path
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(path)], check=True)


def environment(path: Path, **more: str) -> dict[str, str]:
    """For Python in a checkout: its own packages come before those that are installed, which are this checkout's."""
    folders = [_IN_PYTEST, *(path / name for name in ("agent", "server", "client", "dashboard", "tests", "benchmarks"))]
    ours = {"PYTHONPATH": os.pathsep.join(map(str, folders)), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | ours | more


def options(path: Path) -> list[str]:
    """Of pytest. Tests are shuffled where the commit does so, but always alike."""
    shuffles = "pytest-randomly" in (path / "pyproject.toml").read_text(encoding="utf-8")
    order = ["--randomly-seed=0"] if shuffles else ["-p", "no:randomly"]
    return ["-q", "-p", "patient", "-p", "no:cacheprovider", *order]


class Forker:
    """A process of in_pytest/forked_pytest.py in a checkout of its own."""

    def __init__(self, path: Path, log: Path) -> None:
        self.path, self._log = path, log
        self._process = subprocess.Popen(
            [sys.executable, str(_IN_PYTEST / "forked_pytest.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=path,
            env=environment(path),
        )
        self._sound: dict[str, bool] = {}

    def run(self, tests: Sequence[Case]) -> tuple[str, str | None]:
        """How they ended, and the first that failed."""
        expected_cpu_s, expected_s = sum(test.cpu_s for test in tests), sum(test.seconds for test in tests)
        wanted = {
            "options": options(self.path),
            "files": list(dict.fromkeys(_file(test) for test in tests)),
            "tests": [test.id for test in tests],
            "cpu_s": _LEAST_CPU_S + 3 * expected_cpu_s,
            "seconds": 3 * _LEAST_CPU_S + 5 * expected_s,  # what hangs uses no CPU; the machine may be busy
            "log": str(self._log),
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return str(answer["ended"]), answer["failed"]

    def is_sound(self, test: Case) -> bool:
        """Whether the test passes here with the source as it is."""
        if test.id not in self._sound:
            self._sound[test.id] = self.run([test])[0] == "passed"
        return self._sound[test.id]

    def close(self) -> None:
        self._process.communicate()


def try_mutant(forker: Forker, mutant: Mutant, placed: Placed, touching: Sequence[Case], budget_s: float) -> Result:
    """Tests that fail without the mutant as well are left out, and the others run again."""
    began = time.monotonic()
    chosen = _in_budget(touching, budget_s)
    ended, by = ("survived" if chosen else "untouched"), ""
    while chosen:
        with _mutated(forker.path / mutant.file, placed.source):
            how, failed = forker.run(_together(chosen))
        if how == "passed":
            break
        culprits = [test for test in chosen if test.id == failed] or chosen[:1]
        if all(forker.is_sound(test) for test in culprits):
            ended, by = ("late" if how == "late" else "killed"), failed or how
            break
        if how == "broken":  # its file cannot be read here
            culprits = [test for test in chosen if _file(test) == _file(culprits[0])]
        chosen = [test for test in chosen if test not in culprits]
    took_s, left_out = round(time.monotonic() - began, 1), len(touching) - len(chosen)
    return result(mutant, placed.line, ended, by=by, ran=len(chosen), left_out=left_out, took_s=took_s)


def result(mutant: Mutant, line: int, ended: str, **more: Any) -> Result:
    where = asdict(mutant)
    del where["repeat"]
    return Result(**where, id=mutant.id, line=line, ended=ended, **more)


def try_all(
    forkers: Sequence[Forker],
    work: Iterator[tuple[Mutant, Placed, Sequence[Case]]],
    done: Callable[[Result], None],
    budget_s: float,
) -> None:
    """Each forker takes the next mutant. done: called with one result at a time."""
    lock = threading.Lock()
    troubles: list[BaseException] = []

    def take(forker: Forker) -> None:
        while not troubles:
            with lock:
                one = next(work, None)
            if one is None:
                return
            try:
                result = try_mutant(forker, *one, budget_s)
            except BaseException as trouble:
                troubles.append(trouble)
                return
            with lock:
                done(result)

    threads = [threading.Thread(target=take, args=(forker,)) for forker in forkers]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as trouble:
        troubles.append(trouble)  # after those that run now there are no more
        raise
    if troubles:
        raise troubles[0]


def _file(test: Case) -> str:
    return test.id.partition("::")[0]


def _in_budget(tests: Sequence[Case], budget_s: float) -> list[Case]:
    """The first of them, at least one."""
    chosen: list[Case] = []
    spent = 0.0
    for test in tests:
        if chosen and spent + test.cpu_s > budget_s:
            break
        chosen.append(test)
        spent += test.cpu_s
    return chosen


def _together(tests: Sequence[Case]) -> list[Case]:
    """Those of one file side by side, so that each of its fixtures is made once; the file with the first test comes first."""
    files = list(dict.fromkeys(_file(test) for test in tests))
    return sorted(tests, key=lambda test: files.index(_file(test)))


@contextlib.contextmanager
def _mutated(path: Path, source: str) -> Iterator[None]:
    """The compiled file goes both times: Python takes it for that of any source of its size and second."""
    original = path.read_text(encoding="utf-8")
    compiled = Path(importlib.util.cache_from_source(str(path)))
    try:
        path.write_text(source, encoding="utf-8")
        compiled.unlink(missing_ok=True)
        yield
    finally:
        path.write_text(original, encoding="utf-8")
        compiled.unlink(missing_ok=True)
