"""Processes of multiprocessing that attach before anybody knows whose rank they are: real ones, and a server that
listens."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import job_environment, sync, until
from ingest_server import IngestServer

TRAIN = """
import sys, time, torch, perfagent
import torch.distributed as dist, torch.multiprocessing as mp

torch.set_num_threads(1)

def train(steps, wrap=lambda model: model):
    model = wrap(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(20, 4)).pow(2).mean().backward()
        optimizer.step()
"""


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as running:
        yield running


def run(script: str, folder: Path, server: IngestServer, *arguments: str, **variables: str) -> str:
    (folder / "train.py").write_text(TRAIN + script)
    environment = job_environment(folder, PERFAGENT_SERVER=server.url, OMP_NUM_THREADS="1", **variables)
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def told_to_its_end(folder: Path, server: IngestServer, processes: int) -> None:
    sync(job_environment(folder, PERFAGENT_SERVER=server.url))

    def ended() -> bool:
        frames = sorted(server.frames, key=lambda frame: frame.seq)
        last = {one.source: event.data["state"] for one in frames for event in one.events if event.kind == "state"}
        return [*last.values()] == ["finished"] * processes

    until(ended, within_s=30, why="the end of a process was not told")


def places(server: IngestServer) -> list[tuple[int, int]]:
    told = [event.data for one in server.stored.values() for event in one.events if event.kind == "state"]
    return [(data["rank"], data["world_size"]) for data in told if "rank" in data]


@pytest.mark.real
def test_variables_left_in_a_shell_make_no_job(tmp_path: Path, server: IngestServer) -> None:
    """It trains in no group, and nobody else is there."""
    left = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    run("perfagent.attach()\ntrain(5)", tmp_path, server, RANK="1", WORLD_SIZE="4", **left)
    told_to_its_end(tmp_path, server, 1)
    ((name, rank),) = {(frame.run, frame.rank) for frame in server.frames}
    assert (bool(name), rank) == (True, 0)
    assert sorted(server.values("loss")) == [1, 2, 3, 4, 5]
    assert places(server)[-1] == (0, 1)
    names = [state["name"] for state in server.events("state") if "name" in state]
    assert names[-1] == f"train-{name[:4]}"
