"""Percentiles and shares of the phases, through the API."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest
from api_builders import api, frame, send
from builders import until
from sqlalchemy import event

from perfagent_server.runs.figures import quantile


def test_percentiles_are_those_of_the_newest_steps(tmp_path: Path) -> None:
    draw = random.Random(1)
    old, new = [9.0] * 300, [draw.expovariate(10.0) for _ in range(1000)]
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": old + new, "phase/data_s": [0.0] * 300 + [value / 4 for value in new]}))
        told = client.get("/api/v1/runs/r1/timing", params={"steps": 1000}).json()
        everything = client.get("/api/v1/runs/r1/timing", params={"steps": 5000}).json()
    assert (told["from_step"], told["to_step"]) == (301, 1300)
    cuts = statistics.quantiles(new, n=100, method="inclusive")
    found = told["series"]["step_time_s"]
    assert [found["p50"], found["p90"], found["p99"]] == pytest.approx([cuts[49], cuts[89], cuts[98]])
    assert found["count"] == 1000
    assert found["mean"] == pytest.approx(statistics.mean(new))
    assert told["shares"] == pytest.approx({"data": 0.25})
    assert everything["series"]["step_time_s"]["p99"] == 9.0
    assert everything["series"]["step_time_s"]["count"] == 1300


def test_shares_are_of_all_the_time_and_absent_where_nothing_was_measured(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        phases = {"phase/forward_s": [0.1] * 4, "phase/backward_s": [0.2] * 4, "phase/optimizer_s": [0.1] * 4}
        send(client, frame({"step_time_s": [0.8] * 4, **phases, "phase/comm_s": [0.2] * 4}))
        send(client, frame({"phase/eval_s": [0.2]}, seq=2, first_step=3))  # in one step of the four
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["shares"] == pytest.approx({"compute": 0.5, "communication": 0.25, "evaluation": 0.0625})
    assert told["series"]["phase/eval_s"]["count"] == 1


def test_a_rollout_has_a_share_of_its_own(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": [0.2] * 4, "phase/forward_s": [0.1] * 4}))
        send(client, frame({"step_time_s": [3.2], "phase/rollout_s": [3.0]}, seq=2, first_step=5))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["shares"] == pytest.approx({"compute": 0.1, "rollout": 0.75})


def test_a_step_that_was_not_timed_as_a_whole_counts_nowhere(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"phase/backward_s": [9.0] + [0.06] * 39, "phase/optimizer_s": [1.0] + [0.04] * 39}))
        send(client, frame({"step_time_s": [0.1] * 39}, seq=2, first_step=2))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert (told["from_step"], told["to_step"]) == (2, 40)
    assert told["shares"] == pytest.approx({"compute": 1.0})
    assert {series["count"] for series in told["series"].values()} == {39}


def test_an_evaluation_after_the_last_step_adds_to_the_whole(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"step_time_s": [0.1] * 40, "phase/forward_s": [0.1] * 40}))
        send(client, frame({"phase/eval_s": [12.0]}, seq=2, first_step=40))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["shares"] == pytest.approx({"compute": 0.25, "evaluation": 0.75})


def test_ranks_are_put_together_as_the_catalogue_says(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for rank, step_time in ((0, 1.0), (1, 3.0)):
            send(client, frame({"step_time_s": [step_time] * 5, "phase/comm_s": [step_time / 2] * 5}, rank=rank))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["series"]["step_time_s"]["p50"] == 3.0, "the slowest rank is the step"
    assert told["series"]["phase/comm_s"]["p50"] == 1.0, "a phase is the mean"


def test_all_phases_are_read_from_the_tail_in_one_pass(tmp_path: Path) -> None:
    """Fourteen series one by one unpacked each row of the tail fifteen times: 11 s with 512 ranks."""
    with api(tmp_path) as client:
        for rank in range(3):
            columns = {"step_time_s": [1.0] * 5, "phase/comm_s": [0.5] * 5, "phase/forward_s": [0.25] * 5}
            send(client, frame(columns, rank=rank))
        services = client.app.state.services  # type: ignore[attr-defined]
        until(lambda: services.engine.counters["frames"] == 3)  # the rules read the tail, too
        statements: list[str] = []
        engine = services.database.engine
        event.listen(engine, "before_cursor_execute", lambda *about: statements.append(about[2]))
        told = client.get("/api/v1/runs/r1/timing").json()
    assert told["series"].keys() == {"step_time_s", "phase/comm_s", "phase/forward_s"}
    passes = [sql for sql in statements if "WHERE tail.run = ? AND tail.samples > ?" in sql]
    assert len(passes) == 1


def test_a_run_without_steps_has_no_timing(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        told = client.get("/api/v1/runs/r1/timing").json()
        assert told == {"from_step": 0, "to_step": 0, "series": {}, "shares": {}}
        assert client.get("/api/v1/runs/nobody/timing").status_code == 404
        assert client.get("/api/v1/runs/r1/timing", params={"steps": 0}).status_code == 422


def test_quantiles_of_few_values() -> None:
    assert quantile([5.0], 0.99) == 5.0
    assert quantile([1.0, 2.0], 0.5) == 1.5
    assert quantile([1.0, 2.0, 4.0], 1.0) == 4.0
