"""Runs the scripts of these tests in processes of their own, and compares what they logged with what their run has."""

from __future__ import annotations

import json
import re
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

from agent_recorded import Recording
from builders import job_environment
from preloaded import run

__all__ = ["logged_once", "printed", "ran"]


def ran(folder: Path, script: Path | str, *words: str) -> str:
    """What it printed. script: a file, or the text of one, which may import trainers.py. It ends well, and perfagent says
    nothing but that a loss is NaN."""
    if isinstance(script, str):
        beside = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        (folder / "script.py").write_text(beside + textwrap.dedent(script), encoding="utf-8")
        script = folder / "script.py"
    [ended] = run([str(script), *words], folder, [job_environment(folder / "environment", OMP_NUM_THREADS="1")])
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    assert not re.search(r"perfagent:(?!.*the loss is NaN)", output), output[-3000:]
    return ended.stdout


def printed(folder: Path, script: str) -> Any:
    """The JSON in its last line."""
    return json.loads(ran(folder, script).strip().splitlines()[-1])


def logged_once(folder: Path) -> tuple[Recording, set[str]]:
    """The record of a script that has left in logged.json what it logged, and those names. The run has each scalar exactly,
    once, at its step, however often and to however many loggers it was given under one name for one step."""
    told = Counter({(name, step, value) for name, step, value in json.loads((folder / "logged.json").read_text())})
    assert told
    names, recording = {name for name, _, _ in told}, Recording(folder / "record")
    assert Counter((name, step, value) for name in names for step, value in recording.series(name)) == told
    return recording, names
