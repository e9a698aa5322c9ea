"""Trainings of a SLURM step: one run each, the same one on every rank, and a restart is a new attempt of it."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

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
print(who.rank, who.run, who.attempt, flush=True)
"""


def task(number: int, tasks: int, **more: str) -> dict[str, str]:
    place = {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_NODEID": str(number), "SLURM_NTASKS": str(tasks)}
    return JOB | place | more


def elastic(number: int, restart: int, *, size: int = 2, nodes: int = 1) -> dict[str, str]:
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(size),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
    }


def srun(folder: Path, environ: dict[str, str], *trainings: dict[str, str]) -> list[list[str]]:
    """What each training of a task says; each is a process of its own, under one shell, with its own variables."""
    command = shlex.join([sys.executable, "-c", TRAINING])
    lines = [" ".join([*(f"{name}={value}" for name, value in own.items()), command]) for own in trainings]
    done = subprocess.run(
        ["sh", "-c", "\n".join([*lines, "true"])], env=job_environment(folder, **environ),
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert not done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_trainings_one_after_the_other_in_a_step_are_runs_of_their_own(tmp_path: Path) -> None:
    (_, first, began), (_, second, later) = srun(tmp_path, task(0, 1), {}, {})
    assert (first, second) == ("slurm-42", "slurm-42-2")
    assert int(began) < int(later)


def test_runs_of_one_process_in_a_step_are_told_apart(tmp_path: Path) -> None:
    config = AgentConfig(state_dir=tmp_path)
    first, second = (Identity.from_environment(config, environ=task(0, 1)) for _ in range(2))
    assert (first.run, second.run) == ("slurm-42", "slurm-42-2")


def test_every_rank_counts_alike_without_a_word_from_another_node(tmp_path: Path) -> None:
    said = [srun(tmp_path / f"node{number}", task(number, 2), {}, {}) for number in (0, 1)]
    assert said[0] == [["0", "slurm-42", "1700000000000"], ["0", "slurm-42-2", "1700000000000"]]
    assert [words[1:] for words in said[1]] == [words[1:] for words in said[0]]


def test_ranks_count_alike_in_a_shared_home(tmp_path: Path) -> None:
    said = [srun(tmp_path, task(number, 2), {}) for number in (0, 1)]
    assert [words[0][1] for words in said] == ["slurm-42", "slurm-42"]


def test_a_requeued_job_counts_from_the_beginning(tmp_path: Path) -> None:
    before = srun(tmp_path, task(0, 2), {}, {})
    after = srun(tmp_path, task(0, 2, SLURM_JOB_START_TIME="1700009999", SLURM_RESTART_COUNT="1"), {}, {})
    assert [words[1] for words in before] == [words[1] for words in after] == ["slurm-42", "slurm-42-2"]
    assert all(int(old[2]) < int(new[2]) for old, new in zip(before, after, strict=True))


def test_torchrun_starting_its_workers_again_is_a_new_attempt_of_the_run(tmp_path: Path) -> None:
    (_, run, began), (_, same, later), (_, joined, told) = srun(
        tmp_path, task(0, 1), elastic(0, 0), elastic(0, 1), elastic(1, 1)
    )
    assert run == same == joined == "slurm-42"
    assert int(began) < int(later) == int(told)


def test_another_torchrun_in_the_step_is_another_run(tmp_path: Path) -> None:
    said = [srun(tmp_path, task(0, 1), elastic(0, 0), elastic(1, 0)) for _ in range(2)]
    assert [[words[1] for words in training] for training in said] == [["slurm-42"] * 2, ["slurm-42-2"] * 2]
    assert srun(tmp_path, task(0, 1), {})[0][1] == "slurm-42-3", "and a training without torchrun counts with them"


def test_a_training_in_each_task_is_not_the_steps_run(tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    said = [srun(tmp_path / str(number), task(number, 2), elastic(0, 0), alone) for number in (0, 1)]
    runs = {words[1] for training in said for words in training}
    assert len(runs) == 4
    assert not any(run.startswith("slurm") for run in runs)


def test_torchrun_on_all_nodes_of_a_step_is_the_steps_run(tmp_path: Path) -> None:
    assert srun(tmp_path, task(1, 2), elastic(0, 0, nodes=2))[0][1] == "slurm-42"


def test_where_nothing_can_be_written_the_step_has_one_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = AgentConfig(state_dir=tmp_path / "file")
    assert Identity.from_environment(config, environ=task(0, 1)).run == "slurm-42"


def test_what_counts_the_trainings_of_a_step_goes_when_no_step_can_still_run(tmp_path: Path) -> None:
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for name, weeks in (("recent", 2), ("old", 9)):
        (jobs / name).symlink_to("1-2-0")
        at = time.time() - weeks * 7 * 86400
        os.utime(jobs / name, (at, at), follow_symlinks=False)
    Identity.from_environment(AgentConfig(state_dir=tmp_path), environ=task(0, 1))
    assert (jobs / "recent").is_symlink()
    assert not (jobs / "old").is_symlink()
