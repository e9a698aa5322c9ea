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


def is_everyday(row: Row) -> bool:
    return row in _rows(row.module, everyday=True)


def trained(row: Row) -> tuple[list[dict[str, Any]], Path]:
    """What each rank of a row says it did, alone and watched, and where the agent recorded it; its processes are started by the
    first that asks of the rows that they train."""
    everyday = is_everyday(row)
    folder, trouble = _job(row.module, everyday=everyday)
    assert not trouble, trouble
    place = folder / str(_rows(row.module, everyday=everyday).index(row))
    return [json.loads((place / f"rank-{rank}.json").read_text()) for rank in range(row.ranks)], place / "record"


def _rows(module: str, *, everyday: bool) -> list[Row]:
    rows = [row for row in ROWS if row.module == module and row.exists_in(version("torch"))]
    count = EVERYDAY.get(module, 1)
    return rows[:count] if everyday else rows[count:]


_folders: list[tempfile.TemporaryDirectory[str]] = []


@functools.cache
def _job(module: str, *, everyday: bool) -> tuple[Path, str]:
    """Where the processes of a module have left what they did, and why not all of them did it."""
    _folders.append(tempfile.TemporaryDirectory())
    folder, rows = Path(_folders[-1].name), _rows(module, everyday=everyday)
    loops = [",".join([row.function, *(f"{name}={value}" for name, value in row.options.items())]) for row in rows]
    ranks = rows[0].ranks
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} | meeting if ranks > 1 else {} for rank in range(ranks)]
    environments = [job_environment(folder / "environment", OMP_NUM_THREADS="1", **place) for place in places]
    for ended in run([str(JOB), str(folder), module, *loops], folder, environments):
        output = ended.stdout + ended.stderr
        if ended.returncode != 0 or "perfagent" in re.sub(NAN, "", output):
            return folder, f"exit code {ended.returncode}\n{output[-3000:]}"
    return folder, ""
