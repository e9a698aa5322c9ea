"""Trainings of a SLURM step: one run each, the same one on every rank, and a restart is a new attempt of it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from builders import job_environment

from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity

JOB = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_JOB_START_TIME": "1700000000"}
TRAINING = """
import sys
from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity
config = AgentConfig.from_env()
place = Identity.from_environment(config, meet=False)  # as `perfagent run` does, before it becomes the trainer
who = Identity.from_environment(config)
if "slurm" in str(place.run):
    assert place.run == who.run
print(who.run, who.attempt, flush=True)
"""
ONE, TWO, THREE = "slurm-42", "slurm-42-2", "slurm-42-3"


def task(number: int, tasks: int, **more: str) -> dict[str, str]:
    place = {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_NODEID": str(number), "SLURM_NTASKS": str(tasks)}
    return JOB | place | more


def elastic(number: int, restart: int, *, nodes: int = 1) -> dict[str, str]:
    rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": str(nodes)}
    launched = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": str(restart)}
    return rank | launched | {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}


def srun(folder: Path, environ: dict[str, str], *trainings: dict[str, str]) -> list[tuple[str, int]]:
    """Run and attempt of each training of a task; each is a process of its own, under one shell, with its own
    variables."""
    command = shlex.join([sys.executable, "-c", TRAINING])
    lines = [" ".join([*(f"{name}={value}" for name, value in own.items()), command]) for own in trainings]
    done = subprocess.run(
        ["sh", "-c", "\n".join([*lines, "true"])], env=job_environment(folder, **environ),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert not done.stderr
    return [(run, int(attempt)) for run, attempt in map(str.split, done.stdout.splitlines())]


@pytest.mark.real
def test_trainings_of_a_step_are_runs_of_their_own(tmp_path: Path) -> None:
    (first, began), (second, later) = srun(tmp_path, task(0, 1), {}, {})
    assert (first, second, began < later) == (ONE, TWO, True)


@pytest.mark.real
def test_every_rank_counts_alike_and_a_requeued_job_anew(tmp_path: Path) -> None:
    """Without a word from another node, and in a shared home."""
    apart = [srun(tmp_path / f"node{number}", task(number, 2), {}, {}) for number in (0, 1)]
    assert apart == [[(ONE, 1_700_000_000_000), (TWO, 1_700_000_000_000)]] * 2
    assert [srun(tmp_path, task(number, 2), {})[0][0] for number in (0, 1)] == [ONE, ONE]
    requeued = task(0, 2, SLURM_JOB_START_TIME="1700009999", SLURM_RESTART_COUNT="1")
    assert srun(tmp_path / "node0", requeued, {}, {}) == [(ONE, 1_700_009_999_001), (TWO, 1_700_009_999_001)]


@pytest.mark.real
def test_a_restart_by_torchrun_is_a_new_attempt_of_the_run(tmp_path: Path) -> None:
    said = srun(tmp_path, task(0, 1), elastic(0, 0), elastic(0, 1), elastic(1, 1))
    assert [run for run, _ in said] == [ONE] * 3
    before, after, other = (attempt for _, attempt in said)
    assert before < after == other


def in_this_process(state: Path) -> str | None:
    return Identity.from_environment(AgentConfig(state_dir=state), environ=task(0, 1)).run


def test_runs_of_one_process_in_a_step_are_told_apart(tmp_path: Path) -> None:
    assert [in_this_process(tmp_path), in_this_process(tmp_path)] == [ONE, TWO]
