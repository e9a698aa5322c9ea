"""Reads from SLURM's variables whether a training is the whole step, and which of the step's trainings it is.

A step may run several trainings one after the other (`srun bash -c "python a.py; python b.py"`, `srun --pty bash`), and
a job's id alone would make one run of them. Each task counts its trainings on its own node, so that all ranks come to
the same number without a word to each other; a requeued job counts from the beginning, and its trainings are new
attempts of the same runs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = [
    "STEP_TASKS", "count_training", "first_number", "job_started_ms", "number", "ranks_are_tasks", "run_id", "under_srun",
    "whole_step",
]  # fmt: skip

STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LAUNCHERS = ("GROUP_WORLD_SIZE", "CROSS_SIZE")
"""On how many nodes torchrun and deepspeed run as one: they start the ranks, and srun starts them, one a task."""
_MOST = 10_000


def under_srun(env: Mapping[str, str]) -> bool:
    """Inside a batch script SLURM_PROCID is 0 and SLURM_NTASKS that of the allocation, but only srun starts the
    tasks."""
    step = number(env, "SLURM_STEP_ID")
    return step is not None and step < 0xFFFFFF00  # the batch and interactive steps have the highest numbers


def whole_step(env: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Whether the training of this rank takes up all tasks of its step: else the step's id is no name for it alone."""
    tasks = first_number(env, STEP_TASKS) or 1
    launchers = first_number(env, _LAUNCHERS)
    if launchers is not None:
        return launchers == tasks
    return tasks == 1 or ranks_are_tasks(env, rank, world_size)


def ranks_are_tasks(env: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Whether there is a task for each rank."""
    return (rank, world_size) == (number(env, "SLURM_PROCID"), first_number(env, STEP_TASKS))


def job_started_ms(env: Mapping[str, str]) -> int:
    """Start of the job, the same on all nodes, 0 where SLURM does not say it. A job that is requeued starts later."""
    started = number(env, "SLURM_JOB_START_TIME")
    return 1000 * started + (number(env, "SLURM_RESTART_COUNT") or 0) if started else 0


def run_id(env: Mapping[str, str], number: int) -> str:
    """`slurm-JOB`, `.STEP` where it is not the first, `-2` for the step's second training."""
    step = env["SLURM_STEP_ID"]
    return f"slurm-{env['SLURM_JOB_ID']}" + (f".{step}" if step != "0" else "") + (f"-{number + 1}" if number else "")


def count_training(folder: Path, env: Mapping[str, str], *, owner: str, local_rank: str = "0") -> int:
    """How many trainings this task had before that of `owner`, a process that is the same for all of them.

    A link for each: it is made with what it says in one call that fails where there is one, on network file systems
    too.
    """
    told = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_START_TIME", "SLURM_RESTART_COUNT", "SLURM_PROCID")
    parts = ["slurm", *(env.get(name, "") for name in told), local_rank]
    task = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MOST):
            link = folder / f"{task}.training-{number}"
            try:
                link.symlink_to(owner)
            except FileExistsError:
                if os.readlink(link) != owner:  # noqa: PTH115 - a Path would make it a path
                    continue
            return number
    except OSError:
        pass  # no folder, or one without links: then the step is taken to have this one
    return 0


def first_number(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    """Of these variables the first that holds a whole number."""
    return next((found for name in names if (found := number(env, name)) is not None), None)


def number(env: Mapping[str, str], name: str) -> int | None:
    """A whole number in a variable; None where there is none."""
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return None
