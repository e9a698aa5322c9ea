"""All ranks of a job are one run whatever started them, without a word of configuration; each node speaks once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from agent_recorded import Recorded, recorded
from builders import free_port, job_environment
from case_selection import everyday
from preloaded import run

HERE = Path(__file__).parent
NODE = "host/memory_used_bytes"
PERFAGENT = ("perfagent", "run")
pytestmark = pytest.mark.real


def launch(folder: Path, *words: str, **more: str) -> list[Recorded]:
    done = subprocess.run(
        [sys.executable, *words],
        env=job_environment(folder, PERFAGENT_RECORD=str(folder / "record"), OMP_NUM_THREADS="1", **more),
        capture_output=True, text=True, timeout=170, check=False, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return recorded(folder / "record")


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher",
    [
        "torch.distributed.run --nproc-per-node 2 --master-port PORT -m",
        "deepspeed.launcher.runner --num_accelerators 2 --master_port PORT --module",
    ],
)
def test_a_launchers_ranks_are_one_run(launcher: str, tmp_path: Path) -> None:
    words = ["-m", *launcher.replace("PORT", str(free_port())).split(), *PERFAGENT, str(HERE / "meeting.py")]
    assert_one_run(launch(tmp_path, *words, "2", "env://"), nodes=1)


SLURM = {"SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "RANK", "SLURM_NTASKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "RANK", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "RANK",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
}  # fmt: skip
DEEPSPEED = {
    "RANK": "RANK", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "CROSS_RANK": "RANK", "CROSS_SIZE": "2", "LOCAL_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("launcher", "nodes"),
    everyday(
        3,
        [
            (SLURM | {"SLURM_LOCALID": "0", "SLURM_NODEID": "RANK"}, 2), (OPEN_MPI, 1), ({}, 1),
            (SLURM | {"SLURM_LOCALID": "RANK", "SLURM_NODEID": "0"}, 1), (OPEN_MPI | {"PMIX_NAMESPACE": "prterun-17@1"}, 1),
            ({"PMI_RANK": "RANK", "PMI_SIZE": "2", "MPI_LOCALRANKID": "RANK"}, 1), (DEEPSPEED, 2),
        ],
    ),
    ids=["slurm of two nodes", "open mpi", "nothing", "slurm", "pmix", "intel mpi", "deepspeed of two nodes"],
)  # fmt: skip
def test_ranks_meet_in_the_environment_of(launcher: dict[str, str], nodes: int, tmp_path: Path) -> None:
    """nodes: the nodes' folders are apart, so that their ranks have nothing but the job's own store in common."""
    address = f"tcp://127.0.0.1:{free_port()}"
    environments = []
    for rank in "01":
        variables = {name: rank if value == "RANK" else value for name, value in launcher.items()}
        variables |= {"PERFAGENT_RECORD": str(tmp_path / "record"), "MEETING_RANK": rank}
        environments.append(job_environment(tmp_path / (f"node{rank}" if nodes == 2 else "node"), **variables))
    late = [] if launcher else ["late"]
    ended = run([str(HERE / "meeting.py"), "2", address, *late], tmp_path, environments)
    assert [one.returncode for one in ended] == [0, 0], ended
    sources = recorded(tmp_path / "record")
    assert_one_run(sources, nodes=nodes)
    if "SLURM_JOB_ID" in launcher:
        assert sources[0].run == "slurm-4711"
    if nodes == 2:
        assert [source.states[0]["node_rank"] for source in sources] == [0, 1]


def assert_one_run(sources: list[Recorded], *, nodes: int) -> None:
    assert [source.rank for source in sources] == [0, 1]
    assert sources[0].run
    assert sources[0].attempt > 0
    assert {(source.run, source.attempt) for source in sources} == {(sources[0].run, sources[0].attempt)}
    assert sum(NODE in source.series for source in sources) == nodes
    assert all(source.states[-1]["state"] == "finished" for source in sources)
    assert all(sorted(source.series["loss"]) == [1, 2, 3, 4] for source in sources)


@pytest.mark.long
@pytest.mark.parametrize("outside", [True, False], ids=["run accelerate", "accelerate run"])
def test_what_accelerate_starts_alone_is_monitored(outside: bool, tmp_path: Path) -> None:
    """It tells a single process no rank."""
    launch_words = "--cpu --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
    starts = ["-m", "accelerate.commands.launch", *launch_words.split()]
    script = [str(HERE / "meeting.py"), "1", f"tcp://127.0.0.1:{free_port()}"]
    words = ["-m", *PERFAGENT, *starts, *script] if outside else [*starts, "-m", *PERFAGENT, *script]
    (source,) = launch(tmp_path, *words, MEETING_RANK="0")
    assert sorted(source.series["loss"]) == [1, 2, 3, 4]
    assert source.states[-1]["state"] == "finished"
