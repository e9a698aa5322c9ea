"""Trains rows of the matrix in processes of their own.

Rows of one module are trained one after the other in the same processes, whose start takes longer than the training: a
framework is imported once for all of them. Some rows are trained every day; the others, in processes of their own, only
by tests that are marked `long`.
"""

from __future__ import annotations

import functools
import json
import re
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from agent.frameworks.matrix import ROWS, Row
from builders import free_port, job_environment
from preloaded import run

JOB = Path(__file__).with_name("job.py")
EVERYDAY = {"plain": 2, "parallel": 2, "zero": 2}
"""How many rows of a module are trained every day; one of each other: twelve."""
NAN = "perfagent: the loss is NaN.* in step 4.*"
"""What the agent prints of the one training whose loss becomes NaN."""


@dataclass(frozen=True)
class Training:
    """One row, trained. told: what each rank says it did, alone and watched. record: what the agent recorded."""

    told: list[dict[str, Any]]
    record: Path


def is_everyday(row: Row) -> bool:
    return row in _rows(row.module, everyday=True)


def trained(row: Row) -> Training:
    """What became of a row; its processes are started by the first that asks of the rows that they train."""
    rows = _rows(row.module, everyday=is_everyday(row))
    job = _job(row.module, everyday=is_everyday(row))
    assert not job.trouble, job.trouble
    folder = job.folder / str(rows.index(row))
    told = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(row.ranks)]
    return Training(told, folder / "record")


def _rows(module: str, *, everyday: bool) -> list[Row]:
    rows = [row for row in ROWS if row.module == module and row.exists_in(version("torch"))]
    count = EVERYDAY.get(module, 1)
    return rows[:count] if everyday else rows[count:]


_folders: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True)
class _Job:
    """Where the processes of a module have left what they did. trouble: why not all of them did it."""

    folder: Path
    trouble: str


@functools.cache
def _job(module: str, *, everyday: bool) -> _Job:
    _folders.append(tempfile.TemporaryDirectory())
    folder = Path(_folders[-1].name)
    rows = _rows(module, everyday=everyday)
    loops = [",".join([row.function, *(f"{name}={value}" for name, value in row.options.items())]) for row in rows]
    ranks = rows[0].ranks
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | meeting if ranks > 1 else {} for rank in range(ranks)]
    environments = [job_environment(folder / "environment", OMP_NUM_THREADS="1", **place) for place in places]
    for ended in run([str(JOB), str(folder), module, *loops], folder, environments):
        output = ended.stdout + ended.stderr
        if ended.returncode != 0 or "perfagent" in re.sub(NAN, "", output):
            return _Job(folder, f"exit code {ended.returncode}\n{output[-3000:]}")
    return _Job(folder, "")
