from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from builders import free_port, job_environment

from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity
from perfagent.pids import process_start

ELASTIC = {
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


STEP = {
    "SLURM_JOB_ID": "42",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_NODEID": "0",
    "SLURM_JOB_START_TIME": "1700000000",
}


def rank(number: int, **more: str) -> dict[str, str]:
    return ELASTIC | {"RANK": str(number), "LOCAL_RANK": str(number)} | more


def who(folder: Path, environ: dict[str, str], *, now: float = 1000.0, run_id: str | None = None) -> Identity:
    return Identity.from_environment(
        AgentConfig(state_dir=folder, run_id=run_id), environ=environ, now=lambda: now, ordinal=0
    )


def test_a_single_process_draws_an_id_of_its_own(tmp_path: Path) -> None:
    first, second = who(tmp_path, {}), who(tmp_path, {})
    assert first.known
    assert first.run != second.run
    assert first.source != second.source
    assert (first.rank, first.world_size, first.attempt) == (0, 1, 1_000_000)


def test_the_users_id_wins_over_everything(tmp_path: Path) -> None:
    assert who(tmp_path, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, run_id="mine").run == "mine"


def test_the_ranks_of_a_node_agree_through_a_file_whichever_comes_first(tmp_path: Path) -> None:
    second = who(tmp_path, rank(1), now=999.0)
    assert not second.poll()
    first = who(tmp_path, rank(0))
    assert second.poll()
    assert (second.run, second.attempt) == (first.run, first.attempt) == (first.run, 1_000_000)
    assert (second.rank, second.local_rank, second.world_size) == (1, 1, 2)


def test_a_restart_by_the_launcher_keeps_the_run_and_is_a_new_attempt(tmp_path: Path) -> None:
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


def test_a_bare_number_as_rendezvous_id_names_no_run(tmp_path: Path) -> None:
    jobs = [who(tmp_path / node, rank(0, TORCHELASTIC_RUN_ID="100", MASTER_ADDR=node)) for node in ("a", "b")]
    assert jobs[0].run != jobs[1].run
    other = who(tmp_path / "a", rank(1, TORCHELASTIC_RUN_ID="100", MASTER_ADDR="a"))
    assert other.poll()
    assert other.run == jobs[0].run


def test_a_named_run_still_shares_the_attempt(tmp_path: Path) -> None:
    first = who(tmp_path, rank(0), run_id="mine", now=5.0)
    second = who(tmp_path, rank(1), run_id="mine", now=6.0)
    assert second.poll()
    assert (first.attempt, second.attempt) == (5000, 5000)


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


def test_outside_torchrun_the_file_of_a_dead_rank_0_is_not_believed(tmp_path: Path) -> None:
    plain = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    first = who(tmp_path, plain | {"RANK": "0"})
    second = who(tmp_path, plain | {"RANK": "1"})
    assert second.poll()
    assert second.run == first.run
    (path,) = (tmp_path / "jobs").glob("*.json")
    left = json.loads(path.read_text()) | {"pid_start": 1}
    path.write_text(json.dumps(left))
    assert not who(tmp_path, plain | {"RANK": "1"}).poll()


def test_slurm_names_the_run_under_srun_only(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    step = job | {"SLURM_STEP_ID": "0", "SLURM_JOB_START_TIME": "1700000000"}
    found = who(tmp_path, step)
    assert (found.run, found.attempt, found.rank, found.world_size, found.local_rank) == (
        "slurm-4711",
        1_700_000_000_000,
        1,
        4,
        1,
    )
    again = who(tmp_path, step | {"SLURM_RESTART_COUNT": "2", "SLURM_JOB_START_TIME": "1700009999"})
    assert again.run == found.run
    assert again.attempt > found.attempt
    assert who(tmp_path, step | {"SLURM_STEP_ID": "3"}).run == "slurm-4711.3"
    batch = who(tmp_path, job | {"SLURM_PROCID": "0"})
    assert (batch.world_size, batch.rank) == (1, 0)
    assert not str(batch.run).startswith("slurm")


def test_mpi_tells_ranks(tmp_path: Path) -> None:
    environ = {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
        "PMIX_NAMESPACE": "job@1",
    }
    found = who(tmp_path, environ)
    assert (found.rank, found.local_rank, found.world_size) == (3, 1, 4)


def test_open_mpis_rank_on_the_node_is_not_taken_for_the_node(tmp_path: Path) -> None:
    environ = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
    assert who(tmp_path, environ | {"OMPI_COMM_WORLD_NODE_RANK": "3"}).node_rank is None
    assert who(tmp_path, {}).node_rank == 0


def test_nodes_that_share_a_home_have_locks_of_their_own(tmp_path: Path) -> None:
    def key(node: str, number: int) -> str | None:
        step = STEP | {"SLURM_NTASKS": "4", "SLURM_PROCID": str(number)}
        return Identity.from_environment(AgentConfig(state_dir=tmp_path), environ=step, machine=lambda: node).job_key

    assert key("node1", 0) == key("node1", 1) != key("node2", 2) == key("node2", 3)


JOB_KEY = """
from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity
print(Identity.from_environment(AgentConfig.from_env()).job_key)
"""


def by_hand(number: int) -> dict[str, str]:
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


def by_mpich(number: int) -> dict[str, str]:
    return {"PMI_RANK": str(number), "PMI_SIZE": "2", "MPI_LOCALRANKID": str(number)}


def by_slurm(number: int) -> dict[str, str]:
    return STEP | {"SLURM_NTASKS": "2", "SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}


RANK_OF_A_TASK = "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=29500\n"


@pytest.mark.parametrize(
    ("told", "prelude"), [(by_hand, ""), (by_mpich, ""), (by_slurm, ""), (by_slurm, RANK_OF_A_TASK)]
)
def test_ranks_that_have_a_script_of_their_own_each_are_one_job(
    told: Callable[[int], dict[str, str]], prelude: str, tmp_path: Path
) -> None:
    """As with `mpirun sh task.sh`: each rank's parent is a shell of its own."""
    task = f"{prelude}{shlex.join([sys.executable, '-c', JOB_KEY])}\ntrue"
    keys = {
        subprocess.check_output(
            ["sh", "-c", task], env=job_environment(tmp_path, **told(number)), text=True, timeout=60
        )
        for number in (0, 1)
    }
    assert len(keys) == 1
    assert keys != {"None\n"}


@pytest.mark.parametrize("environ", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "5", "WORLD_SIZE": "2"}, {"RANK": "0"}])
def test_nonsense_in_the_environment_is_a_single_process(tmp_path: Path, environ: dict[str, str]) -> None:
    assert who(tmp_path, environ).world_size == 1


def test_a_process_is_told_apart_from_a_later_one_with_its_number() -> None:
    assert process_start(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert process_start(child.pid) == 0


TWO_NODES = """
import time, torch.distributed as dist
from pathlib import Path
from perfagent.agent_config import AgentConfig
from perfagent.identity import Identity
who = Identity.from_environment(AgentConfig.from_env())
if who.rank == 1:
    assert not who.known
dist.init_process_group("gloo")
end = time.monotonic() + 30
while time.monotonic() < end and not (who.poll() and (who.rank or who.meeting._stored)):
    time.sleep(0.02)
print(who.rank, who.run, who.attempt, flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_ranks_on_different_nodes_agree_through_the_jobs_store(tmp_path: Path) -> None:
    port = str(free_port())
    ranks = []
    for number in (0, 1):
        environ = job_environment(
            tmp_path / f"node{number}",
            RANK=str(number),
            WORLD_SIZE="2",
            LOCAL_RANK="0",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
        )
        command = [sys.executable, "-c", TWO_NODES]
        ranks.append(subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    (zero, run, attempt), (one, same_run, same_attempt) = (out.split() for out, _ in said)
    assert (zero, one) == ("0", "1")
    assert (run, attempt) == (same_run, same_attempt)
