"""Processes of multiprocessing that attach before anybody knows whose rank they are: real ones, and a server that
listens."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import free_port, job_environment, sync, until
from ingest_server import IngestServer

from perfagent.identity.process_group import in_group

NODE = "host/memory_used_bytes"


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as running:
        yield running


SPAWNED = """
import sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp, perfagent

def rank_of(rank, port):
    torch.set_num_threads(1)
    run = perfagent.attach({how})
    time.sleep(1.5)  # longer than the sender waits before it sends
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(10):
        optimizer.zero_grad()
        model(torch.ones(20, 4)).pow(2).mean().backward()
        optimizer.step()
    while run._identity.joining is not None or not run._identity.known:
        time.sleep(0.05)
    time.sleep(1.5)
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(rank_of, args=(int(sys.argv[1]),), nprocs=2)
"""


def started(script: str, folder: Path, server: IngestServer, *arguments: str, **variables: str) -> str:
    (folder / "train.py").write_text(script)
    environment = job_environment(folder, PERFAGENT_SERVER=server.url, OMP_NUM_THREADS="1", **variables)
    command = [sys.executable, "train.py", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def last_states(server: IngestServer) -> list[str]:
    """One of each process."""
    frames = sorted(server.frames, key=lambda frame: frame.seq)
    last = {frame.source: event.data["state"] for frame in frames for event in frame.events if event.kind == "state"}
    return sorted(last.values())


@pytest.mark.long
@pytest.mark.parametrize("how", ["name='job'", "run_id='named'"])
def test_ranks_that_attach_before_they_join_a_group_are_one_run(how: str, tmp_path: Path, server: IngestServer) -> None:
    started(SPAWNED.format(how=how), tmp_path, server, str(free_port()))
    sync(job_environment(tmp_path, PERFAGENT_SERVER=server.url))
    until(lambda: last_states(server) == ["finished"] * 2, within_s=30, why="a rank's end was not told")
    frames = [*server.stored.values()]
    assert len({(frame.run, frame.attempt) for frame in frames}) == 1
    assert {frame.rank for frame in frames} == {0, 1}
    assert len({(frame.rank, frame.source) for frame in frames}) == 2
    for source in {frame.source for frame in frames}:
        assert sorted(server.values("loss", source=source)) == list(range(1, 11))
    places = [
        event.data for frame in frames for event in frame.events if event.kind == "state" and "rank" in event.data
    ]
    assert sorted((place["rank"], place["world_size"]) for place in places) == [(0, 2), (1, 2)], "and of no other place"
    assert len({frame.source for frame in frames if any(NODE in group.values for group in frame.groups)}) == 1


ALONE = """
import torch, perfagent
torch.set_num_threads(1)
perfagent.attach()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(20, 4)).pow(2).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "left",
    [
        pytest.param({}, id="rank", marks=pytest.mark.long),
        pytest.param({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, id="rank and address"),
    ],
)
def test_variables_that_were_left_in_a_shell_make_no_job(
    left: dict[str, str], tmp_path: Path, server: IngestServer
) -> None:
    """It trains in no group, and nobody else is there."""
    started(ALONE, tmp_path, server, RANK="1", WORLD_SIZE="4", **left)
    sync(job_environment(tmp_path, PERFAGENT_SERVER=server.url))
    until(lambda: server.states()[-1:] == ["finished"], within_s=30, why="the run's end was not told")
    (frame, *rest) = server.frames
    assert frame.run
    assert {(one.run, one.rank) for one in [frame, *rest]} == {(frame.run, 0)}
    assert sorted(server.values("loss")) == [1, 2, 3, 4, 5]
    places = [event.data for one in server.frames for event in one.events if "world_size" in event.data]
    assert (places[-1]["rank"], places[-1]["world_size"]) == (0, 1)
    assert places[-1]["name"] == f"train-{frame.run[:4]}"


KILLED = """
import multiprocessing, os, signal, time, torch, perfagent

def trial():
    print(perfagent.attach().id, flush=True)
    for share in (0.5, 1.0):  # the second call settles the step of the first
        perfagent.log({"read": share})
    time.sleep(2.5)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=trial)
    process.start()
    process.join()
"""

NEXT = """
import time, perfagent
from perfagent.agent_config import AgentConfig
(left,) = AgentConfig.from_env().sources.iterdir()
perfagent.init()
perfagent.log({"later": 1.0})
end = time.monotonic() + 60
while left.exists() and time.monotonic() < end:
    time.sleep(0.1)
"""


@pytest.mark.long
def test_one_that_is_killed_before_it_joined_is_told_by_the_next_start(tmp_path: Path, server: IngestServer) -> None:
    """As the run whose id it has shown."""
    shown = started(KILLED, tmp_path, server).strip()
    assert not server.frames
    started(NEXT, tmp_path, server)
    assert [frame.run for frame in server.frames if any("read" in group.values for group in frame.groups)] == [shown]


TRIALS = """
import json, multiprocessing, torch, perfagent

def trial(number):
    torch.set_num_threads(1)
    run = perfagent.attach(name=f"trial {number}")
    before = run.id
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(number):
        optimizer.zero_grad()
        model(torch.ones(20, 4)).pow(2).mean().backward()
        optimizer.step()
    perfagent.finish()
    assert run.id == before
    return run.id

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps(pool.map(trial, [0, 3, 2])))
"""


@pytest.mark.long
def test_trials_of_a_search_in_a_pool_are_runs_of_their_own(tmp_path: Path, server: IngestServer) -> None:
    """One of them ends before it has begun to train."""
    runs = json.loads(started(TRIALS, tmp_path, server))
    sync(job_environment(tmp_path, PERFAGENT_SERVER=server.url))
    until(lambda: last_states(server) == ["finished"] * 3, within_s=30, why="a trial's end was not told")
    assert {frame.run for frame in server.frames} == set(runs)
    steps = {frame.run: sorted(server.values("loss", source=frame.source)) for frame in server.frames}
    assert [steps[run] for run in runs] == [[], [1, 2, 3], [1, 2]]
    assert {frame.rank for frame in server.frames} == {0}
    assert len({frame.source for frame in server.frames}) == 3


def test_torch_distributed_that_another_thread_is_importing_is_no_group_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has `is_available` before anything else; a look at the rest would fail, and turn off who looks."""
    unfinished = types.ModuleType("torch.distributed")
    unfinished.is_available = lambda: True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.distributed", unfinished)
    assert not in_group()
