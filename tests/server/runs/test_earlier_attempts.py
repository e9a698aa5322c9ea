"""The verdict of a run that was started again says how its earlier attempts ended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Event, Finding
from perfagent_server.store.tables import source


class Job:
    """A job that is started again and again, each time for a minute."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.wall = bench, Clock(NOW)

    def say(self, attempt: int, kind: str, step: int, **data: object) -> None:
        event = Event(kind=kind, time=self.wall.at, step=step, data=data)
        self.bench.send({}, [], attempt=attempt, events=[event], now=self.wall.at)

    def train(self, attempt: int, steps: range, end: str, loss: float = 2.0) -> None:
        self.say(attempt, "state", 0, state="running", world_size=1)
        self.bench.send({"loss": [loss] * len(steps)}, steps, attempt=attempt, now=self.wall.at)
        self.wall.at += 60
        self.say(attempt, "state", steps[-1], state=end, reason="CUDA out of memory")
        self.verdict()  # the server judges while the run goes on
        self.wall.at += 60

    def verdict(self) -> Finding:
        engine = self.bench.engine(clock=self.wall)
        while engine.run_once():
            pass
        return engine.verdict("r")


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    bench = Bench(tmp_path)
    with closing(bench.database):
        yield Job(bench)


def test_each_attempt_before_is_told_behind_what_is_found_now(job: Job) -> None:
    job.say(1, "alert", 40, title="checkpoint saved", level="warning")  # a remark of the script is no cause of an end
    job.train(1, range(1, 41), "oom")
    assert "attempt" not in job.verdict().message
    job.train(2, range(31, 91), "preempted")
    job.train(3, range(91, 201), "finished")
    first = "Earlier attempts: attempt 1 ran out of memory after step 40 (oom_observed)"
    assert f"{first}; attempt 2 was preempted" in job.verdict().message
    job.train(4, range(201, 251), "finished", loss=float("nan"))
    assert job.verdict().rule == "nonfinite_loss"
    assert "attempt 1 ran out of memory" in job.verdict().message


def test_an_attempt_that_never_trained_is_not_told(job: Job) -> None:
    """And said nothing of its end."""
    job.say(1, "state", 0, state="running", world_size=1)
    job.wall.at += 60
    job.bench.write(source.update().values(state="lost"))
    job.train(2, range(1, 41), "finished")
    assert "attempt" not in job.verdict().message
