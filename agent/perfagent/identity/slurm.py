"""Reads from SLURM's variables whether a training is the whole step, whose id is then the run's: a requeued job is a new
attempt of the same run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

__all__ = ["STEP_TASKS", "first_number", "number", "ranks_are_tasks", "run_id", "under_srun"]

STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
_LAUNCHERS = ("GROUP_WORLD_SIZE", "CROSS_SIZE")
"""On how many nodes torchrun and deepspeed run as one: they start the ranks, and srun starts them, one a task."""


def under_srun(env: Mapping[str, str]) -> bool:
    """Inside a batch script SLURM_PROCID is 0 and SLURM_NTASKS that of the allocation, but only srun starts the
    tasks."""
    step = number(env, "SLURM_STEP_ID")
    return step is not None and step < 0xFFFFFF00  # the batch and interactive steps have the highest numbers


def ranks_are_tasks(env: Mapping[str, str], rank: int, world_size: int) -> bool:
    """Whether there is a task for each rank."""
    return (rank, world_size) == (number(env, "SLURM_PROCID"), first_number(env, STEP_TASKS))


def run_id(env: Mapping[str, str], rank: int, world_size: int, before: int) -> str | None:
    """`slurm-JOB`, `.STEP` where it is not the first, `-2` for the second run of a process. None where the training of this
    rank does not take up all tasks of its step, and in an interactive one, whose trainings have nothing in common.

    before: how many runs this process has had.
    """
    job, step, tasks = env.get("SLURM_JOB_ID"), env.get("SLURM_STEP_ID"), first_number(env, STEP_TASKS) or 1
    if not job or not under_srun(env) or "SLURM_PTY_PORT" in env:
        return None
    launchers = first_number(env, _LAUNCHERS)
    alone = tasks == 1 or ranks_are_tasks(env, rank, world_size)
    if not (alone if launchers is None else launchers == tasks):
        return None
    return f"slurm-{job}" + (f".{step}" if step != "0" else "") + (f"-{before + 1}" if before else "")


def first_number(env: Mapping[str, str], names: Iterable[str]) -> int | None:
    """The first whole number in these variables."""
    return next((found for name in names if (found := number(env, name)) is not None), None)


def number(env: Mapping[str, str], name: str) -> int | None:
    """A whole number in a variable; None where there is none."""
    try:
        return int(env[name])
    except (KeyError, ValueError):
        return None
