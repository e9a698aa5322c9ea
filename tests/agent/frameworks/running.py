"""Runs the scripts of these tests in processes of their own, and compares what they logged with what their run has."""

from __future__ import annotations

import functools
import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import builders
from agent.scripts import run_script
from agent_recorded import Recording

__all__ = ["logged_once", "printed", "ran", "trained"]

PATH = f"{Path(__file__).parent}:{Path(builders.__file__).parent}"
"""Of trainers.py and of the tests' own modules."""
_folders: list[tempfile.TemporaryDirectory[str]] = []


def ran(folder: Path, script: Path | str, *words: str, fresh: bool = False) -> str:
    """What it printed. It ends well, and perfagent says nothing but that a loss is NaN."""
    ended = run_script(folder, script, *words, fresh=fresh, PYTHONPATH=PATH)
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output[-3000:]
    assert not re.search(r"perfagent:(?!.*the loss is NaN)", output), output[-3000:]
    return ended.stdout


def printed(folder: Path, script: str) -> Any:
    """The JSON in its last line."""
    return json.loads(ran(folder, script).strip().splitlines()[-1])


@functools.cache
def trained(script: Path, *words: str, fresh: bool = False) -> Path:
    """The folder that a script was told, in which it has left what it logged and recorded. It runs once."""
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    ran(folder, script, str(folder), *words, fresh=fresh)
    return folder


def logged_once(folder: Path) -> tuple[Recording, set[str]]:
    """The record of a script that has left in logged.json what it logged, and those names. The run has each scalar exactly,
    once, at its step, however often and to however many loggers it was given under one name for one step."""
    told = Counter({(name, step, value) for name, step, value in json.loads((folder / "logged.json").read_text())})
    assert told
    names, recording = {name for name, _, _ in told}, Recording(folder / "record")
    assert Counter((name, step, value) for name in names for step, value in recording.series(name)) == told
    return recording, names
