"""A training that is attached and then resumed from a checkpoint continues the run of that checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders import job_environment, until
from ingest_server import IngestServer
from preloaded import Running, started
from resumable import small_loop, train

import perfagent
from perfagent import session
from perfagent.run import Run

LEVEL = "checkpoint/level"
pytestmark = pytest.mark.real


@pytest.fixture(autouse=True)
def no_run_left() -> Iterator[None]:
    yield
    perfagent.finish()


@pytest.fixture
def server() -> Iterator[IngestServer]:
    with IngestServer() as running:
        yield running


def first_attempt(folder: Path, server: IngestServer) -> str:
    """The id of a run that ended after step 4, of which there is a checkpoint."""
    run = perfagent.attach(name="training", server=server.url)
    train(small_loop(folder, every=2), steps=4)
    run.finish()
    assert run.id is not None
    return run.id


def logged(server: IngestServer, run: str) -> dict[float, set[str]]:
    """Values of LEVEL in one run, and the sources that sent them."""
    found: dict[float, set[str]] = {}
    for frame in server.stored.values():
        for group in frame.groups:
            if frame.run == run and LEVEL in group.values:
                for value in group.column(LEVEL):
                    found.setdefault(value, set()).add(frame.source)
    return found


def resumed(run: Run, folder: Path) -> None:
    run.log({LEVEL: 1.0})
    training = small_loop(folder, every=2)
    assert training.resume() == 4
    assert session.current() is run and not run.ended
    run.log({LEVEL: 2.0})
    train(training, steps=8)
    run.log({LEVEL: 3.0})
    run.finish()


def test_a_resumed_training_continues_its_run(tmp_path: Path, server: IngestServer) -> None:
    first = first_attempt(tmp_path, server)
    run = perfagent.attach(name="training", server=server.url)
    drawn = run.id
    assert drawn is not None
    run.log({LEVEL: 0.0}, step=0)
    until(lambda: logged(server, drawn), why="the drawn run was never sent")
    resumed(run, tmp_path)
    assert (run.id, run.url) == (first, f"{server.url}/run/{first}")
    values = logged(server, first)
    assert set(values) == {0.0, 1.0, 2.0, 3.0}
    assert len(set.union(*values.values())) == 1, "more sources than one in the second attempt"
    frames = [*server.stored.values()]
    steps = [step for frame in frames for group in frame.groups if "lr" in group.values for step in group.steps()]
    assert sorted(steps) == list(range(1, 9))
    assert len({frame.attempt for frame in frames if frame.run == first}) == 2
    states = [event.data for frame in frames if frame.run == drawn for event in frame.events if event.kind == "state"]
    assert [data.get("continues") for data in states if data["state"] == "finished"] == [first]


def test_an_id_that_was_given_stays(tmp_path: Path, server: IngestServer) -> None:
    first_attempt(tmp_path, server)
    run = perfagent.attach(name="training", server=server.url, run_id="mine")
    resumed(run, tmp_path)
    assert run.id == "mine"
    assert set(logged(server, "mine")) == {1.0, 2.0, 3.0}


def test_without_a_checkpoint_the_run_goes_on(tmp_path: Path, server: IngestServer) -> None:
    run = perfagent.attach(name="training", server=server.url)
    drawn = run.id
    training = small_loop(tmp_path, every=2)
    assert training.resume() is None
    train(training, steps=2)
    run.finish()
    assert run.id == drawn
    assert {frame.run for frame in server.stored.values()} == {drawn}


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
