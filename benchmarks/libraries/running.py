"""Runs one script of trainings/, in processes of its own: without the agent and with it."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from builders import job_environment

__all__ = ["TRAININGS", "FailedError", "Ran", "both"]

TRAININGS = Path(__file__).with_name("trainings")
TIMEOUT_S = 300.0
QUIET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
"""What keeps a training small, alike each time, and away from the network."""


@dataclass(frozen=True)
class Ran:
    """One process: what its script noted, and all that it printed."""

    truth: dict[str, Any]
    output: str


class FailedError(Exception):
    """A script did not come to its end."""


def _train(python: Path, script: Path, folder: Path, *, watched: bool) -> Ran:
    """One process of a script, which works below `folder`; what the agent recorded is in folder/record. Raises
    FailedError."""
    place = folder / "work"
    place.mkdir(parents=True)
    truth = folder / "truth.json"
    environment = job_environment(folder, **QUIET, TRUTH=str(truth))
    command = [str(python), str(script)]
    if watched:
        environment["PERFAGENT_RECORD"] = str(folder / "record")
        command[1:1] = ["-m", "perfagent", "run"]
    try:
        ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise FailedError(f"not at its end after {TIMEOUT_S:.0f} s") from None
    if ended.returncode != 0 or not truth.exists():
        said = (ended.stderr.strip() or f"exit code {ended.returncode}, and nothing noted").splitlines()[-1]
        raise FailedError(f"failed {'with' if watched else 'without'} the agent: {said[:300]}")
    return Ran(json.loads(truth.read_text("utf-8")), ended.stdout + ended.stderr)


def both(python: Path, script: Path, folder: Path) -> tuple[Ran, Ran]:
    """The script without the agent and with it."""
    return _train(python, script, folder / "alone", watched=False), _train(
        python, script, folder / "watched", watched=True
    )
