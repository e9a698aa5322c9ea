"""A training that is attached and then resumed from a checkpoint continues the run of that checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_recorded import Recording
from builders import job_environment, until
from ingest_server import IngestServer
from resumable import small_loop, train

import perfagent
from perfagent import session
from perfagent.run import Run

LEVEL = "checkpoint/level"


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
    run.log({LEVEL: 2.0})
    train(training, steps=8)
    run.log({LEVEL: 3.0})
    run.finish()


@pytest.mark.parametrize("told", [True, False])
def test_a_resumed_training_continues_its_run(told: bool, tmp_path: Path, server: IngestServer) -> None:
    first = first_attempt(tmp_path, server)
    run = perfagent.attach(name="training", server=server.url)
    drawn = run.id
    assert drawn is not None
    if told:  # the server knows the run that was drawn, with what was logged in it
        run.log({LEVEL: 0.0}, step=0)
        until(lambda: logged(server, drawn), why="the drawn run was never sent")
    resumed(run, tmp_path)
    assert (run.id, run.url) == (first, f"{server.url}/run/{first}")
    values = logged(server, first)
    assert set(values) == {1.0, 2.0, 3.0} | ({0.0} if told else set())
    assert len(set.union(*values.values())) == 1, "more sources than one in the second attempt"
    steps = [
        step
        for frame in server.stored.values()
        for group in frame.groups
        if "lr" in group.values
        for step in group.steps()
    ]
    assert sorted(steps) == list(range(1, 9))
    (attempts,) = {tuple(sorted({frame.attempt for frame in server.stored.values() if frame.run == first}))}
    assert len(attempts) == 2
    states = [
        data
        for frame in server.stored.values()
        if frame.run == drawn
        for data in (event.data for event in frame.events if event.kind == "state")
    ]
    assert [data.get("continues") for data in states if data["state"] == "finished"] == ([first] if states else [])


def test_the_run_object_of_the_script_stays(tmp_path: Path, server: IngestServer) -> None:
    first_attempt(tmp_path, server)
    run = perfagent.attach(name="training", server=server.url)
    small_loop(tmp_path, every=2).resume()
    assert session.current() is run
    assert not run.ended


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


def test_a_recording_continues_its_run(tmp_path: Path, server: IngestServer) -> None:
    first = first_attempt(tmp_path / "saved", server)
    run = perfagent.attach(name="training", record=tmp_path / "record")
    resumed(run, tmp_path / "saved")
    assert run.id == first
    assert [value for _, value in Recording(tmp_path / "record").series(LEVEL)] == [1.0, 2.0, 3.0]


IN_A_FOLDER = """
import sys
from pathlib import Path
from resumable import small_loop, train
import perfagent

run = perfagent.attach(name="training", record=sys.argv[2])
training = small_loop(Path(sys.argv[1]), every=1)
training.resume()
train(training, steps=training.step_count + 2)
print(training.step_count, run.id, flush=True)
sys.stdin.readline()
"""


def test_a_second_start_beside_a_living_one_is_told_so_and_is_a_run_of_its_own(tmp_path: Path) -> None:
    children: list[subprocess.Popen[str]] = []

    def start() -> list[str]:
        """Its step and the id of its run, once it waits after its last step."""
        words = [sys.executable, "-c", IN_A_FOLDER, str(tmp_path / "runs"), str(tmp_path / f"record{len(children)}")]
        with (tmp_path / f"said{len(children)}").open("w") as said:
            child = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True,
                env=job_environment(tmp_path, PYTHONPATH=str(Path(__file__).parents[2])),
            )  # fmt: skip
        children.append(child)
        assert child.stdout is not None
        return child.stdout.readline().split()

    try:
        step, first = start()
        assert (step, (tmp_path / "said0").read_text()) == ("2", "")
        step, second = start()
        assert step == "4", "it trains on, from the newest checkpoint"
        assert second != first
        assert (tmp_path / "said1").read_text().count(f"process {children[0].pid} on {os.uname().nodename}") == 1
        for child in children:
            child.kill()
            child.wait()
        step, third = start()
        assert (step, third, (tmp_path / "said2").read_text()) == ("6", second, "")
    finally:
        for child in children:
            child.kill()
            child.communicate()
