"""Which run, attempt and rank a process is: by what its launcher tells it, and by a word between ranks."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from builders import free_port, job_environment

from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity

PLAIN = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = PLAIN | {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0"}
STEP = {
    "SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1",
    "SLURM_NODEID": "0",
}  # fmt: skip


def rank(number: int, **more: str) -> dict[str, str]:
    return ELASTIC | {"RANK": str(number), "LOCAL_RANK": str(number)} | more


def who(folder: Path, environ: dict[str, str], *, now: float = 1000.0, run_id: str | None = None) -> Identity:
    config = AgentConfig(state_dir=folder, run_id=run_id)
    return Identity.from_environment(config, environ=environ, now=lambda: now, ordinal=0)


def test_a_single_process_draws_an_id_of_its_own(tmp_path: Path) -> None:
    first, second = who(tmp_path, {}), who(tmp_path, {})
    assert first.known
    assert first.run != second.run
    assert first.source != second.source
    assert (first.rank, first.world_size, first.attempt) == (0, 1, 1_000_000)
    for nonsense in ({"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "5", "WORLD_SIZE": "2"}, {"RANK": "0"}):
        assert who(tmp_path, nonsense).world_size == 1


def test_the_users_id_wins_over_everything(tmp_path: Path) -> None:
    assert who(tmp_path, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, run_id="mine").run == "mine"
    first, second = who(tmp_path, rank(0), run_id="mine", now=5.0), who(tmp_path, rank(1), run_id="mine", now=6.0)
    assert second.poll()
    assert (first.attempt, second.attempt) == (5000, 5000), "the attempt is shared all the same"


def test_ranks_of_a_node_agree_through_a_file(tmp_path: Path) -> None:
    """Whichever comes first."""
    second = who(tmp_path, rank(1), now=999.0)
    assert not second.poll()
    first = who(tmp_path, rank(0))
    assert second.poll()
    assert (second.run, second.attempt) == (first.run, first.attempt) == (first.run, 1_000_000)
    assert (second.rank, second.local_rank, second.world_size) == (1, 1, 2)


def test_a_restart_keeps_the_run_and_is_a_new_attempt(tmp_path: Path) -> None:
    before = who(tmp_path, rank(0))
    late = who(tmp_path, rank(1, TORCHELASTIC_RESTART_COUNT="1"))
    assert not late.poll(), "the file of the attempt before is not this attempt's"
    after = who(tmp_path, rank(0, TORCHELASTIC_RESTART_COUNT="1"), now=2000.0)
    assert late.poll()
    assert after.run == before.run == late.run
    assert (before.attempt, after.attempt, late.attempt) == (1_000_000, 2_000_000, 2_000_000)


def test_torchruns_default_id_is_no_id_and_a_chosen_one_is(tmp_path: Path) -> None:
    drawn = "8f14e45f-ceea-467f-a1d3-5f1f1f1f1f1f"  # what torchrun --standalone draws
    assert who(tmp_path, rank(0)).run != "none"
    assert who(tmp_path, rank(0, TORCHELASTIC_RUN_ID=drawn)).run != drawn
    assert who(tmp_path, rank(1, TORCHELASTIC_RUN_ID="nightly-7")).run == "nightly-7"


def test_ranks_that_resume_a_run_agree_on_it_and_on_the_attempt(tmp_path: Path) -> None:
    """Whether they had learned the run that rank 0 drew, or load the checkpoint first; or learn it afterwards."""
    early = who(tmp_path, rank(1, WORLD_SIZE="4"), now=6.0)
    early.adopt("saved")
    first = who(tmp_path, rank(0, WORLD_SIZE="4"), now=5.0)
    learned = who(tmp_path, rank(2, WORLD_SIZE="4"), now=7.0)
    assert early.poll()
    assert learned.run == first.run != "saved"
    first.adopt("saved")
    learned.adopt("saved")
    first.poll()
    late = who(tmp_path, rank(3, WORLD_SIZE="4"), now=8.0)
    assert {(one.run, one.attempt) for one in (first, early, learned, late)} == {("saved", 5000)}


def test_the_start_step_is_shared(tmp_path: Path) -> None:
    Identity.from_environment(AgentConfig(state_dir=tmp_path), environ=rank(0), start_step=500, ordinal=0)
    second = who(tmp_path, rank(1))
    second.poll()
    assert second.start_step == 500


def test_without_torchrun_a_dead_rank_0s_file_is_not_believed(tmp_path: Path) -> None:
    first = who(tmp_path, PLAIN | {"RANK": "0"})
    second = who(tmp_path, PLAIN | {"RANK": "1"})
    assert second.poll()
    assert second.run == first.run
    (path,) = (tmp_path / "jobs").glob("*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pid_start": 1}))
    assert not who(tmp_path, PLAIN | {"RANK": "1"}).poll()


def test_variables_left_in_a_shell_make_no_job(tmp_path: Path) -> None:
    """It trains in no group, and nobody else is there: known at the latest when the run ends."""
    alone = who(tmp_path, PLAIN | {"RANK": "1", "WORLD_SIZE": "4"})
    placed: list[int] = []
    alone.placed = lambda: placed.append(alone.rank)
    assert not alone.poll()
    alone.ended = lambda: True
    assert alone.poll()
    assert (alone.rank, alone.world_size, alone.attempt, placed) == (0, 1, 1_000_000, [0])


def test_slurm_names_the_run_under_srun_only(tmp_path: Path) -> None:
    step = STEP | {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}
    found, first = who(tmp_path, step), who(tmp_path, step | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert found.poll()
    assert (found.run, found.attempt) == (first.run, first.attempt) == ("slurm-42", 1_000_000)
    assert (found.rank, found.world_size, found.local_rank) == (1, 4, 1)
    requeued = who(tmp_path, STEP | {"SLURM_RESTART_COUNT": "2"}, now=2000.0)
    assert (requeued.run, requeued.attempt) == ("slurm-42", 2_000_000)
    assert who(tmp_path, step | {"SLURM_STEP_ID": "3"}).run == "slurm-42.3"
    second = Identity.from_environment(AgentConfig(state_dir=tmp_path), environ=STEP, ordinal=1)
    assert second.run == "slurm-42-2", "of one process"
    batch = {name: value for name, value in STEP.items() if name != "SLURM_STEP_ID"}
    for other in (batch, STEP | {"SLURM_PTY_PORT": "4711"}, STEP | rank(1, GROUP_WORLD_SIZE="2")):
        assert not str(who(tmp_path, other).run).startswith("slurm"), (
            "the step's id is no name for one of its trainings"
        )
    assert who(tmp_path, batch).world_size == 1


def test_a_restart_by_torchrun_under_slurm_is_a_new_attempt(tmp_path: Path) -> None:
    elastic = STEP | rank(0, GROUP_WORLD_SIZE="1")
    before = who(tmp_path, elastic)
    after = who(tmp_path, elastic | {"TORCHELASTIC_RESTART_COUNT": "1"}, now=2000.0)
    assert (before.run, before.attempt, after.run, after.attempt) == ("slurm-42", 1_000_000, "slurm-42", 2_000_000)


def test_mpi_tells_ranks(tmp_path: Path) -> None:
    """Open MPI's rank on the node is not taken for the node."""
    ranks = {"RANK": "3", "LOCAL_RANK": "1", "SIZE": "4", "NODE_RANK": "1"}
    found = who(tmp_path, {f"OMPI_COMM_WORLD_{name}": value for name, value in ranks.items()})
    assert (found.rank, found.local_rank, found.world_size, found.node_rank) == (3, 1, 4, None)
    assert who(tmp_path, {}).node_rank == 0


JOB_KEY = """
from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity
print(Identity.from_environment(AgentConfig.from_env()).job_key)
"""
LAUNCHERS = {
    "by hand": PLAIN | {"RANK": "N", "LOCAL_RANK": "N"},
    "MPICH": {"PMI_RANK": "N", "PMI_SIZE": "2", "MPI_LOCALRANKID": "N"},
}


@pytest.mark.real
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_with_a_shell_of_their_own_are_one_job(launcher: str, tmp_path: Path) -> None:
    """As with `mpirun sh task.sh`: each rank's parent is a shell of its own."""
    task = f"{shlex.join([sys.executable, '-c', JOB_KEY])}\ntrue"
    environments = [
        job_environment(tmp_path, **{name: value.replace("N", number) for name, value in LAUNCHERS[launcher].items()})
        for number in "01"
    ]
    first, second = (
        subprocess.check_output(["sh", "-c", task], env=one, text=True, timeout=60) for one in environments
    )
    assert first == second != "None\n"


TWO_NODES = """
import time, torch.distributed as dist
from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity
who = Identity.from_environment(AgentConfig.from_env())
assert who.known == (who.rank == 0)
dist.init_process_group("gloo")
end = time.monotonic() + 30
while time.monotonic() < end and not (who.poll() and (who.rank or not who.meeting.publishing)):
    time.sleep(0.02)
print(who.rank, who.run, who.attempt, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.real
def test_ranks_on_different_nodes_agree_through_the_jobs_store(tmp_path: Path) -> None:
    place = PLAIN | {"LOCAL_RANK": "0", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_NODES], env=job_environment(tmp_path / f"node{number}", **place, RANK=number),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in "01"
    ]  # fmt: skip
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    (zero, *first), (one, *second) = (out.split() for out, _ in said)
    assert (zero, one, first) == ("0", "1", second)
