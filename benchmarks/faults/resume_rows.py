"""The rows of a training that is killed and resumed: each kind of training in a program of its own (resuming.py)."""

from __future__ import annotations

import json
import os
from pathlib import Path

from builders import job_environment
from faults.outcome import Outcome
from preloaded import run

__all__ = ["TRIALS", "killed_and_resumed"]

HERE = Path(__file__).resolve().parent
TRIALS = {"plain": 100, "ddp": 10, "fsdp2": 10, "zero1": 10, "zero2": 10, "zero3": 10}
"""Kinds of training, and how many random moments to kill each at."""
_WORDS = {
    "plain": "one process", "ddp": "DDP, two ranks", "fsdp2": "FSDP2, two ranks", "zero1": "ZeRO-1, two ranks",
    "zero2": "ZeRO-2, two ranks", "zero3": "ZeRO-3, two ranks",
}  # fmt: skip


def killed_and_resumed(folder: Path, kind: str, *, trials: int, seed: int = 11) -> Outcome:
    """kill -9 at random moments, then resume: counts the trainings whose losses are those of one that nobody
    interrupted."""
    variables = job_environment(folder, DS_ACCELERATOR="cpu")
    words = [str(HERE / "resuming.py"), kind, str(folder / kind), str(trials), str(seed)]
    [done] = run(words, folder, [variables], timeout_s=60 + 60 * trials)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return Outcome("T01", _WORDS[kind], 0, trials, f"exit code {done.returncode}: {done.stderr[-1500:]}")
    found = json.loads(lines[-1])
    figures = f"{found['resumed']} continued from a checkpoint, {found['torn']} were killed while one was written"
    if found["problems"]:
        figures += f"; {os.linesep.join(found['problems'])[:3000]}"
    return Outcome("T01", f"{_WORDS[kind]}: losses to the last bit", found["equal"], trials, figures)
