"""A training that is attached and then resumed from a checkpoint continues the run of that checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment, until
from ingest_server import IngestServer
from preloaded import Running, started
from resumable import small_loop, train

import perfagent
from perfagent import session

pytestmark = pytest.mark.real


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as running:
        yield running
    perfagent.finish()


@pytest.mark.parametrize("given", [None, "mine"])
def test_a_resumed_training_continues_its_run(given: str | None, tmp_path: Path, server: IngestServer) -> None:
    """Unless an id was given. What it had logged before it resumed goes there, too."""
    first = perfagent.attach(name="training", server=server.url)
    training = small_loop(tmp_path, every=2)
    assert training.resume() is None
    train(training, steps=4)
    first.finish()
    assert {frame.run for frame in server.stored.values()} == {first.id}

    run = perfagent.attach(name="training", server=server.url, run_id=given)
    drawn = run.id
    run.log({"checkpoint/level": 0.0}, step=0)
    until(lambda: drawn in {frame.run for frame in server.stored.values()}, why="the drawn run was never sent")
    training = small_loop(tmp_path, every=2)
    assert training.resume() == 4
    assert session.current() is run and not run.ended
    run.log({"checkpoint/level": 1.0})
    train(training, steps=8)
    run.finish()
    assert (run.id, run.url) == (given or first.id, f"{server.url}/run/{given or first.id}")
    frames = [frame for frame in server.stored.values() if frame.run == run.id]
    groups = [(frame.source, group) for frame in frames for group in frame.groups]
    steps = [step for _, group in groups if "lr" in group.values for step in group.steps()]
    assert sorted(steps) == [*range(5 if given else 1, 9)]
    assert len({frame.attempt for frame in frames}) == (1 if given else 2)
    levels = [
        (source, group.column("checkpoint/level")) for source, group in groups if "checkpoint/level" in group.values
    ]
    assert [value for _, values in levels for value in values] == [0.0, 1.0]
    assert len({source for source, _ in levels}) == 1, "more sources than one in the second attempt"
    ends = [event.data for frame in server.stored.values() for event in frame.events if event.kind == "state"]
    assert [data["continues"] for data in ends if "continues" in data] == ([] if given else [first.id])


def test_a_run_attached_after_the_resumption_continues(tmp_path: Path) -> None:
    with perfagent.attach(record=tmp_path / "first") as first:
        train(small_loop(tmp_path / "runs", every=2), steps=4)
    training = small_loop(tmp_path / "runs", every=2)
    assert training.resume() == 4
    with perfagent.attach(record=tmp_path / "second") as second:
        train(training, steps=6)
    assert second.id == first.id
    assert [step for step, _ in Recording(tmp_path / "second").series("lr")] == [5, 6]


IN_A_FOLDER = """
import sys
from pathlib import Path
from resumable import small_loop, train
import perfagent

sys.stdin.readline()  # it is its turn
run = perfagent.attach(name="training")
training = small_loop(Path(sys.argv[1]), every=1)
training.resume()
train(training, steps=training.step_count + 2)
print(training.step_count, run.id, flush=True)
sys.stdin.readline()
"""


def begun(child: Running) -> tuple[str, str, str]:
    """Its step, the id of its run, and what it said, once it waits after its last step."""
    child.stdin.write("\n")
    child.stdin.flush()
    step, run = child.stdout.readline().split()
    return step, run, child.errors.read_text()


def test_a_second_start_beside_a_living_one_is_a_run_of_its_own(tmp_path: Path) -> None:
    (script := tmp_path / "job.py").write_text(IN_A_FOLDER)
    tests = str(Path(__file__).parents[2])
    records = [{"PYTHONPATH": tests, "PERFAGENT_RECORD": str(tmp_path / f"record{number}")} for number in range(3)]
    environments = [job_environment(tmp_path, **record) for record in records]
    with started([str(script), str(tmp_path / "runs")], tmp_path / "streams", environments) as [one, two, three]:
        step, first, said = begun(one)
        assert (step, said) == ("2", "")
        step, second, said = begun(two)
        assert step == "4", "it trains on, from the newest checkpoint"
        assert second != first
        assert said.count(f"process {one.pid} on {os.uname().nodename}") == 1
        for child in (one, two):
            child.send_signal(signal.SIGKILL)
        until(lambda: not any(Path(f"/proc/{child.pid}").exists() for child in (one, two)))
        assert begun(three) == ("6", second, "")
