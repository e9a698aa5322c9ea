"""The verdict of a run that was started again says how its earlier attempts ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_bench import NOW, Bench, Clock
from sqlalchemy import event

from perfagent.wire import Event, Finding
from perfagent_server.store.tables import attempt as attempts


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


def told(time: float, step: int, state: str, **data: object) -> Event:
    return Event(kind="state", time=time, step=step, data={"state": state, **data})


def train(bench: Bench, wall: Clock, attempt: int, steps: range, end: str, losses: float = 2.0) -> None:
    """One attempt of a minute."""
    begins = [told(wall.at, 0, "running", world_size=1)]
    bench.send({"loss": [losses] * len(steps)}, steps, attempt=attempt, events=begins, now=wall.at)
    wall.at += 60
    bench.send(
        {}, [], attempt=attempt, events=[told(wall.at, steps[-1], end, reason="CUDA out of memory")], now=wall.at
    )
    verdict(bench, wall)  # the server judges while the run goes on
    wall.at += 60


def verdict(bench: Bench, wall: Clock) -> Finding:
    engine = bench.engine(clock=wall)
    while engine.run_once():
        pass
    return engine.verdict("r")


def test_how_each_attempt_before_ended_with_its_step_and_its_rules(bench: Bench) -> None:
    wall = Clock(NOW)
    train(bench, wall, 1, range(1, 41), "oom")
    train(bench, wall, 2, range(31, 91), "preempted")
    train(bench, wall, 3, range(91, 201), "finished")
    told = verdict(bench, wall).message
    assert "Earlier attempts: attempt 1 ran out of memory after step 40 (oom_observed); attempt 2 was preempted" in told


def test_a_remark_of_the_script_is_no_cause_of_an_end(bench: Bench) -> None:
    wall = Clock(NOW)
    remark = Event(kind="alert", time=wall.at, step=40, data={"title": "checkpoint saved", "level": "warning"})
    bench.send({}, [], attempt=1, events=[remark], now=wall.at)
    train(bench, wall, 1, range(1, 41), "oom")
    train(bench, wall, 2, range(41, 91), "finished")
    assert "attempt 1 ran out of memory after step 40 (oom_observed)." in verdict(bench, wall).message


def test_a_finding_of_the_newest_attempt_comes_first(bench: Bench) -> None:
    wall = Clock(NOW)
    train(bench, wall, 1, range(1, 41), "oom")
    train(bench, wall, 2, range(41, 91), "finished", losses=float("nan"))
    found = verdict(bench, wall)
    assert found.rule == "nonfinite_loss"
    assert found.message.endswith("Earlier attempts: attempt 1 ran out of memory after step 40 (oom_observed).")


def test_an_attempt_that_never_trained_and_said_nothing_of_its_end_is_not_told(bench: Bench) -> None:
    wall = Clock(NOW)
    bench.send({}, [], attempt=1, events=[told(wall.at, 0, "running", world_size=1)], now=wall.at)
    wall.at += 60
    bench.database.write(lambda connection: connection.exec_driver_sql("UPDATE source SET state = 'lost'") and None)
    train(bench, wall, 2, range(1, 41), "finished")
    assert "attempt" not in verdict(bench, wall).message


def test_a_run_that_never_stopped_has_none(bench: Bench) -> None:
    wall = Clock(NOW)
    train(bench, wall, 1, range(1, 41), "finished")
    assert "attempt" not in verdict(bench, wall).message


def test_of_many_only_the_newest_are_told(bench: Bench) -> None:
    wall = Clock(NOW)
    for attempt in range(1, 8):
        train(bench, wall, attempt, range(10 * attempt, 10 * attempt + 10), "preempted")
    found = verdict(bench, wall).message
    assert "Earlier attempts: 3 more before; attempt 4 was preempted after step 49" in found


def test_the_verdict_of_a_job_that_was_started_a_thousand_times_asks_no_more(bench: Bench) -> None:
    wall = Clock(NOW)
    train(bench, wall, 1001, range(1, 10), "preempted")
    train(bench, wall, 1002, range(10, 20), "preempted")

    def questions() -> int:
        asked: list[object] = []

        def note(*arguments: object) -> None:
            asked.append(arguments[2])

        event.listen(bench.database.backend.engine, "before_cursor_execute", note)
        bench.engine(clock=wall).verdict("r")
        event.remove(bench.database.backend.engine, "before_cursor_execute", note)
        return len(asked)

    few = questions()
    rows = [{"run": "r", "attempt": at, "start_step": 0, "started": NOW - 10_000 + at} for at in range(1, 1000)]
    bench.database.write(lambda connection: connection.execute(attempts.insert(), rows))
    assert questions() <= few + 4
