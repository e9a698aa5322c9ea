"""Makes an environment for one Python and one torch, and runs the agent's unit tests, trainings and the demo in it.

The environment gets the packages of scripts/install --light. This module needs the standard library only."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from versions.catalogue import ROOT, newest_python, trainings, unit_tests

__all__ = ["PARTS", "NoPythonError", "NotInstalledError", "measured", "python_for"]

PARTS = ("unit", "trainings", "demo")

MATRIX = "tests/agent/frameworks/test_matrix.py::test_training_is_captured_and_unchanged"
DEMO = ("demo", "--fault", "nan", "--steps", "200", "--exit", "--no-browser", "--port", "0")
RING_S, TRAININGS_S, DEMO_S = 3600, 1800, 600


class NoPythonError(Exception):
    """There is no Python here that has wheels of a torch."""


class NotInstalledError(Exception):
    """pip could not install something, for the reason in the message."""


def python_for(torch: str) -> str:
    """The first Python on PATH, from 3.11 on, that has wheels of this torch. Raises NoPythonError."""
    newest = newest_python(torch)[1]
    for minor in range(11, newest + 1):
        program = f"python3.{minor}"
        if shutil.which(program) and _version(program):
            return program
    raise NoPythonError(f"torch {torch} needs a Python 3.11 to 3.{newest}: install one, or name it with --python")


def measured(torch: str, python: str, folder: Path, parts: Collection[str] = PARTS) -> dict[str, Any]:
    """What benchmarks/results/versions.json keeps of a torch on a Python. folder: where the environment is made."""
    place = folder / f"torch-{torch}-{Path(python).name}"
    program = place / "bin" / "python"
    _install(torch, python, place)
    result: dict[str, Any] = {"torch": torch, "python": ".".join(map(str, _version(str(program)) or ()))}
    with tempfile.TemporaryDirectory(prefix="versions-") as work:
        report = Path(work) / "report.xml"
        if "unit" in parts:
            _pytest(program, report, RING_S, "-n", "2", "-m", "unit", *unit_tests(torch))
            result["unit"] = _cases(report)
        if "trainings" in parts:
            _pytest(program, report, TRAININGS_S, *(f"{MATRIX}[{row.id}]" for row in trainings(torch)))
            result["trainings"] = _cases(report)
        if "demo" in parts:
            result["demo"] = _demo(program, Path(work))
    return result | {"day": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"}


def _version(program: str) -> tuple[int, int] | None:
    """(3, 11); None where the program does not start, as a shim without a version behind it."""
    ask = [program, "-c", "import sys; print(*sys.version_info[:2])"]
    ended = subprocess.run(ask, capture_output=True, text=True, check=False)
    return None if ended.returncode else tuple(map(int, ended.stdout.split()))  # type: ignore[return-value]


def _install(torch: str, python: str, place: Path) -> None:
    """torch first, of the processor alone where the index has such a build; then the rest at our versions."""
    program = place / "bin" / "python"
    if not program.exists():
        _checked([python, "-m", "venv", str(place)])
    # What is large is not kept a second time in pip's cache.
    pip = [str(program), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    has = f"import importlib.metadata as m; print(m.version('torch').split('+')[0] == {torch!r})"
    if _said([str(program), "-c", has]) != "True":
        try:
            _checked([*pip, "--no-cache-dir", f"torch=={torch}+cpu"])
        except NotInstalledError:
            _checked([*pip, "--no-cache-dir", f"torch=={torch}"])
    pins = place / "constraints.txt"
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines(keepends=True)
    pins.write_text("".join(line for line in lines if not line.startswith("torch==")), "utf-8")
    _checked([*pip, "-c", str(pins), "pip", "hatchling", "editables", "setuptools"])
    project = f"{ROOT}[server,tensorboard]"
    _checked([*pip, "-c", str(pins), "--no-build-isolation", "--editable", project, "--group", "unit"])


def _checked(command: list[str]) -> None:
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR:")]
        raise NotInstalledError((errors or ended.stderr.strip().splitlines() or [f"{command} failed"])[-1])


def _said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _environment() -> dict[str, str]:
    """Nothing of this script's environment, and one thread a process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PERFAGENT_", "PYTHON"))}
    # A torch for GPUs starts a process to find CUDA, unless it is told; unit tests must start none.
    few = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    return kept | few | {"CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": "/usr/local"}


def _pytest(program: Path, report: Path, within_s: float, *words: str) -> None:
    """Runs tests; what they said is in the report only."""
    report.unlink(missing_ok=True)
    command = [str(program), "-m", "pytest", "--quiet", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    # torch 2.4 calls what it has deprecated itself; up to 2.10 a profiler of several cycles warns.
    command += [
        "-W",
        "ignore:.torch.cpu.amp.autocast:FutureWarning",
        "-W",
        "ignore:Warning. Profiler clears:UserWarning",
    ]
    subprocess.run(
        [*command, f"--junitxml={report}", *words], cwd=ROOT, env=_environment(), capture_output=True, timeout=within_s
    )


def _cases(report: Path) -> dict[str, Any]:
    """passed, skipped: how many. failed: name -> why; errors are failures, too."""
    found: dict[str, Any] = {"passed": 0, "skipped": 0, "failed": {}}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}".removeprefix("::")
        kind, why = "passed", ""
        for child in case:
            message = child.get("message") or ""
            if "of the unit ring must stay in its process" in message:
                continue  # says something of the test, not of the versions
            if "ModuleNotFoundError: No module named" in message:
                kind = "skipped"  # a framework that is not installed here
            elif child.tag in ("failure", "error"):
                kind, why = "failed", message
            elif child.tag == "skipped" and kind == "passed":
                kind = "skipped"
        if kind == "failed":
            found["failed"][name] = " ".join(why.split())[:200]
        else:
            found[kind] += 1
    return found


def _demo(program: Path, work: Path) -> str:
    """The last line of its verdict, empty where the demo did what it should."""
    command = [str(program), "-m", "perfagent", *DEMO, "--data", str(work / "data")]
    home = {"HOME": str(work), "XDG_STATE_HOME": str(work / "state"), "XDG_DATA_HOME": str(work / "share")}
    try:
        ended = subprocess.run(
            command, env=_environment() | home, cwd=work, capture_output=True, text=True, timeout=DEMO_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"not at its end after {DEMO_S} s"
    if ended.returncode == 0:
        return ""
    said = re.sub(r"\x1b\[[\d;]*m", "", (ended.stderr.strip() or ended.stdout.strip())).splitlines()
    return (said or [f"exit code {ended.returncode}"])[-1][:200]
