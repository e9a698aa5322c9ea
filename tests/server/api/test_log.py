"""POST /api/v1/log: JSON rows become samples like any other."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import until
from fastapi.testclient import TestClient

from perfagent.wire import Event
from perfagent.wire.limits import MAX_NAMES_PER_RUN
from perfagent_server.database import StorageFull

JSON = {"Content-Type": "application/json"}


def series(client: TestClient, run: str, name: str, **query: Any) -> dict[str, Any]:
    answer = client.get(f"/api/v1/runs/{run}/series", params={"name": name, **query})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_a_row_creates_the_run_and_the_next_one_continues_it(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        first = client.post("/api/v1/log", json={"run": "curl", "metrics": {"loss": 2.5}}).json()
        second = client.post("/api/v1/log", json={"run": "curl", "metrics": {"loss": 2.0}}).json()
        assert (first["stored"], second["stored"]) == (1, 1)
        assert first["run"] == second["run"]
        assert (first["step"], second["step"]) == (1, 2)
        (run,) = client.get("/api/v1/runs").json()["runs"]
        assert (run["name"], run["project"], run["step"], run["state"]) == ("curl", "default", 2, "running")
        assert series(client, run["run"], "loss")["mean"] == [2.5, 2.0]


def test_a_list_of_rows_is_one_call(tmp_path: Path) -> None:
    rows = [
        {"run": "a", "step": step, "metrics": {"x": step * 0.1, **({"y": step} if step % 2 else {})}}
        for step in range(1, 8)
    ]
    with api(tmp_path) as client:
        answer = client.post("/api/v1/log", json=rows).json()
        assert answer["stored"] == 7 + 4
        assert series(client, answer["run"], "x")["mean"] == [step * 0.1 for step in range(1, 8)]
        assert series(client, answer["run"], "y")["step"] == [1, 3, 5, 7]


def test_numbers_that_are_none_arrive_as_they_are(tmp_path: Path) -> None:
    body = (
        '{"run": "a", "metrics": {"n": NaN, "big": 1e999, "text": "NaN", "up": "Infinity", "down": "-Infinity", "huge": 1'
        + "0" * 400
        + "}}"
    )
    with api(tmp_path) as client:
        answer = client.post("/api/v1/log", content=body, headers=JSON)
        assert answer.status_code == 200, answer.text
        latest = client.get(f"/api/v1/runs/{answer.json()['run']}/latest").json()
        assert {name: item["value"] for name, item in latest.items()} == {
            "n": "NaN", "big": "Infinity", "text": "NaN", "up": "Infinity", "down": "-Infinity", "huge": "Infinity",
        }  # fmt: skip


def test_a_retry_with_the_same_key_stores_nothing_again(tmp_path: Path) -> None:
    row = {"run": "a", "metrics": {"loss": 1.0}}
    with api(tmp_path) as client:
        first = client.post("/api/v1/log", json=row, headers={"Idempotency-Key": "k1"}).json()
        again = client.post("/api/v1/log", json=row, headers={"Idempotency-Key": "k1"}).json()
        assert (first["stored"], again["stored"], again["duplicate"]) == (1, 0, 1)
        other = client.post("/api/v1/log", json={**row, "step": 9}, headers={"Idempotency-Key": "k1"})
        assert other.status_code == 422
        assert other.json()["error"]["field"] == "idempotency-key"
        assert series(client, first["run"], "loss")["count"] == [1]


class Held:
    """A job of the database's writer that ends when it is told to."""

    def __init__(self, database: Any) -> None:
        self._began, self._go = threading.Event(), threading.Event()
        self._job = database.submit(lambda _connection: (self._began.set(), self._go.wait(60)))

    def begun(self) -> None:
        assert self._began.wait(60)

    def end(self) -> None:
        self._go.set()


def test_rows_are_answered_while_a_key_waits_for_its_commit(tmp_path: Path) -> None:
    with api(tmp_path) as client, ThreadPoolExecutor(2) as programs:
        services = client.app.state.services  # type: ignore[attr-defined]
        database = services.database

        def sends(run: str, **headers: str) -> Any:
            return programs.submit(client.post, "/api/v1/log", json={"run": run, "metrics": {"x": 1}}, headers=headers)

        first = Held(database)
        first.begun()
        plain = sends("plain")
        until(lambda: services.ingest.waiting == 1, why="the rows were not placed")
        second = Held(database)  # in one transaction with these rows
        first.end()
        second.begun()
        keyed = sends("keyed", **{"Idempotency-Key": "once"})
        until(lambda: database.waiting >= 1, why="the key is not being written down")
        third = Held(database)  # in one transaction with the key
        second.end()
        try:
            assert plain.result(timeout=30).status_code == 200
            assert client.get("/healthz").status_code == 200
            assert not keyed.done()
        finally:
            third.end()
        assert keyed.result(timeout=60).json()["stored"] == 1


def test_a_retry_is_recognised_after_a_restart_of_the_server(tmp_path: Path) -> None:
    row = {"run": "a", "metrics": {"loss": 1.0}}
    with api(tmp_path) as client:
        client.post("/api/v1/log", json=row, headers={"Idempotency-Key": "k1"})
    with api(tmp_path) as client:
        again = client.post("/api/v1/log", json=row, headers={"Idempotency-Key": "k1"}).json()
        assert (again["stored"], again["duplicate"]) == (0, 1)
        following = client.post("/api/v1/log", json=row).json()
        assert following["step"] == 2
        assert len(client.get("/api/v1/runs").json()["runs"]) == 1


def test_ranks_of_one_run_are_kept_apart(tmp_path: Path) -> None:
    rows = [{"run": "a", "rank": rank, "step": 1, "metrics": {"loss": float(rank)}} for rank in range(3)]
    with api(tmp_path) as client:
        run = client.post("/api/v1/log", json=rows).json()["run"]
        found = series(client, run, "loss")
        assert (found["min"], found["max"], found["mean"]) == ([0.0], [2.0], [1.0])
        assert series(client, run, "loss", rank=2)["mean"] == [2.0]


BAD = [
    ("", "body"),
    ("nonsense", "body"),
    ("null", "body"),
    ("3", "body"),
    ("[3]", "0"),
    ("[[]]", "0"),
    ('{"metrics": {}}', "run"),
    ('{"run": "", "metrics": {}}', "run"),
    ('{"run": 5, "metrics": {}}', "run"),
    (json.dumps({"run": "x" * 257, "metrics": {}}), "run"),
    ('{"run": "a\\u0000b", "metrics": {}}', "run"),
    ('{"run": "\\ud800", "metrics": {"a": 1}}', "body"),
    ('{"run": "a", "metrics": {"\\udfff": 1}}', "body"),
    ('{"run": "a"}', "metrics"),
    ('{"run": "a", "metrics": []}', "metrics"),
    ('{"run": "a", "metrics": {"x": null}}', "metrics.x"),
    ('{"run": "a", "metrics": {"x": true}}', "metrics.x"),
    ('{"run": "a", "metrics": {"x": "nan"}}', "metrics.x"),
    ('{"run": "a", "metrics": {"x": {}}}', "metrics.x"),
    ('{"run": "a", "step": "1", "metrics": {"x": 1}}', "step"),
    ('{"run": "a", "step": 1.5, "metrics": {"x": 1}}', "step"),
    ('{"run": "a", "step": -1, "metrics": {"x": 1}}', "step"),
    ('{"run": "a", "step": NaN, "metrics": {"x": 1}}', "step"),
    ('{"run": "a", "step": 1e999, "metrics": {"x": 1}}', "step"),
    ('{"run": "a", "step": 1' + "0" * 40 + ', "metrics": {"x": 1}}', "step"),
    ('{"run": "a", "rank": -1, "metrics": {"x": 1}}', "rank"),
    ('{"run": "a", "rank": 4294967296, "metrics": {"x": 1}}', "rank"),
    ('{"run": "a", "time": NaN, "metrics": {"x": 1}}', "time"),
    ('{"run": "a", "time": "now", "metrics": {"x": 1}}', "time"),
    ('{"run": "a", "project": "", "metrics": {"x": 1}}', "project"),
    ("[" * 100_000, "body"),
    ('{"a":' * 100_000, "body"),
    ('{"run": "a", "metrics": {"x": 1' + "0" * 5000 + "}}", "body"),
    (b"\xff\xfe\x00", "body"),
    (b'{"run": "\xff", "metrics": {}}', "body"),
]


@pytest.mark.parametrize(("body", "field"), BAD, ids=range(len(BAD)))
def test_a_bad_row_is_refused_with_its_field(tmp_path: Path, body: str | bytes, field: str) -> None:
    with api(tmp_path) as client:
        answer = client.post("/api/v1/log", content=body, headers=JSON)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error.get("field", "body") == field
        assert client.get("/api/v1/runs").json()["runs"] == []


def test_one_bad_row_in_a_list_refuses_the_list_and_names_the_row(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        answer = client.post(
            "/api/v1/log", json=[{"run": "a", "metrics": {"x": 1}}, {"run": "a", "metrics": {"x": []}}]
        )
        assert answer.json()["error"]["field"] == "1.metrics.x"
        assert client.post("/api/v1/log", json=[]).json()["stored"] == 0


def test_the_verdict_of_a_run_without_a_loss_claims_nothing_about_its_steps(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        run = client.post("/api/v1/log", json={"run": "a", "step": 7, "metrics": {"accuracy": 0.5}}).json()["run"]
        verdict = client.get(f"/api/v1/runs/{run}/verdict").json()
        assert verdict["rule"] == "healthy"
        assert "Nothing to judge yet" in verdict["message"]


def test_each_rank_counts_its_own_steps_also_after_a_restart(tmp_path: Path) -> None:
    def log(client: TestClient, rank: int) -> int:
        step: int = client.post("/api/v1/log", json={"run": "a", "rank": rank, "metrics": {"x": 1}}).json()["step"]
        return step

    with api(tmp_path) as client:
        assert [log(client, 0), log(client, 0), log(client, 1), log(client, 0)] == [1, 2, 1, 3]
    with api(tmp_path) as client:
        assert [log(client, 1), log(client, 0), log(client, 2)] == [2, 4, 1]


def test_a_row_without_metrics_answers_the_step_of_its_run_and_uses_none_up(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        client.post("/api/v1/log", json={"run": "a", "step": 10, "metrics": {"x": 1}})
        for row in ({}, {"step": 50}):
            told = client.post("/api/v1/log", json={"run": "a", "metrics": {}, **row}).json()
            assert (told["stored"], told["step"]) == (0, 10)
        assert client.post("/api/v1/log", json={"run": "a", "metrics": {"x": 2}}).json()["step"] == 11


@pytest.mark.parametrize("step", [{}, {"step": 50}], ids=["counted", "given"])
def test_a_row_of_which_nothing_can_be_stored_uses_no_step_up(tmp_path: Path, step: dict[str, int]) -> None:
    bad = {"run": "a", "metrics": {"x\u0000": 1}, **step}
    good = {"run": "a", "metrics": {"x": 1}}
    with api(tmp_path) as client:
        client.post("/api/v1/log", json={**good, "step": 10})
        told = client.post("/api/v1/log", json=bad).json()
        assert (told["stored"], told["step"], len(told["rejected"])) == (0, 10, 1)
        told = client.post("/api/v1/log", json=[bad, good, bad, good]).json()
        assert (told["stored"], told["step"]) == (2, 12)
        assert series(client, told["run"], "x")["step"] == [10, 11, 12]


def test_a_row_that_only_has_names_beyond_the_limit_uses_no_step_up(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        full = {f"x{at}": 1 for at in range(MAX_NAMES_PER_RUN)}
        for metrics, stored, step in ((full, len(full), 1), ({"y": 1}, 0, 1), ({"x0": 1}, 1, 2)):
            told = client.post("/api/v1/log", json={"run": "a", "metrics": metrics}).json()
            assert (told["stored"], told["step"]) == (stored, step)


def test_rows_of_last_year_began_last_year_and_the_newest_run_is_still_the_one_begun_last(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        client.post("/api/v1/log", json={"run": "a", "metrics": {"x": 1}})
        rows = [
            {"run": "a", "state": state, "time": time}
            for state, time in (("starting", 1.7e9), ("finished", 1.7e9 + 60))
        ]
        second = client.post("/api/v1/log", json=rows).json()["run"]
        found = run_of(client, second)
        assert (found["started"], found["ended"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:14:20.000Z")
    with api(tmp_path) as client:
        assert client.post("/api/v1/log", json={"run": "a", "metrics": {"x": 2}}).json()["run"] == second


def run_of(client: TestClient, run: str) -> dict[str, Any]:
    found: dict[str, Any] = client.get(f"/api/v1/runs/{run}").json()
    return found


@pytest.mark.parametrize("state", ["finished", "failed", "killed", "oom", "preempted"])
def test_a_row_tells_how_its_run_ended(tmp_path: Path, state: str) -> None:
    with api(tmp_path) as client:
        run = client.post("/api/v1/log", json={"run": "a", "metrics": {"loss": 1.0}}).json()["run"]
        told = client.post("/api/v1/log", json={"run": "a", "state": state, "reason": "the disk is full"})
        assert (told.status_code, told.json()["run"], told.json()["step"], told.json()["stored"]) == (200, run, 1, 0)
        found = run_of(client, run)
        assert (found["state"], found["step"], found["reason"]) == (
            state,
            1,
            "the disk is full" if state != "finished" else "",
        )
        assert found["ended"] is not None


def test_a_failure_told_by_a_row_is_an_alert(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        told = {"run": "a", "metrics": {"loss": 1.0}, "state": "failed", "reason": "ValueError: no such file"}
        run = client.post("/api/v1/log", json=told).json()["run"]

        def verdict() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/api/v1/runs/{run}/verdict").json()
            return found

        until(lambda: verdict()["rule"] == "process_crash", why="the failure raised no alert")
        assert "ValueError: no such file" in verdict()["message"]


def test_a_result_that_comes_after_the_end_still_belongs_to_the_run(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        run = client.post("/api/v1/log", json={"run": "a", "metrics": {"loss": 1.0}, "state": "finished"}).json()["run"]
        late = client.post("/api/v1/log", json={"run": "a", "metrics": {"test/accuracy": 0.9}}).json()
        assert late["run"] == run
        assert run_of(client, run)["state"] == "finished"
        assert series(client, run, "test/accuracy")["mean"] == [0.9]


def test_starting_begins_a_new_run_of_the_name(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        first = client.post("/api/v1/log", json={"run": "a", "metrics": {"loss": 1.0}, "state": "finished"}).json()[
            "run"
        ]
        rows = [
            {"run": "a", "state": "starting"},
            {"run": "a", "metrics": {"loss": 5.0}},
            {"run": "a", "metrics": {"loss": 4.0}},
        ]
        second = client.post("/api/v1/log", json=rows).json()
        third = client.post("/api/v1/log", json={"run": "a", "metrics": {"loss": 3.0}}).json()
        assert second["run"] == third["run"] != first
        assert run_of(client, third["run"])["meta"] == {}
        assert (run_of(client, first)["state"], run_of(client, third["run"])["state"]) == ("finished", "running")
        assert series(client, third["run"], "loss")["mean"] == [5.0, 4.0, 3.0]
        assert series(client, first, "loss")["mean"] == [1.0]


def test_a_run_of_several_ranks_has_finished_when_all_have(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        rows = [{"run": "a", "rank": rank, "metrics": {"loss": 1.0}} for rank in (0, 1)]
        run = client.post("/api/v1/log", json=rows).json()["run"]
        client.post("/api/v1/log", json={"run": "a", "rank": 1, "state": "finished"})
        assert run_of(client, run)["state"] == "running"
        client.post("/api/v1/log", json={"run": "a", "state": "finished"})
        assert run_of(client, run)["state"] == "finished"


def test_an_end_told_twice_under_one_key_is_told_once(tmp_path: Path) -> None:
    row = {"run": "a", "state": "starting", "metrics": {"loss": 1.0}}
    with api(tmp_path) as client:
        answers = [client.post("/api/v1/log", json=row, headers={"Idempotency-Key": "k"}).json() for _ in range(2)]
        assert [(answer["stored"], answer["duplicate"]) for answer in answers] == [(1, 0), (0, 1)]
        assert len(client.get("/api/v1/runs").json()["runs"]) == 1


def test_an_unknown_state_is_refused_with_what_is_allowed(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        answer = client.post("/api/v1/log", json={"run": "a", "state": "done"})
        assert answer.status_code == 400
        assert "finished" in answer.json()["error"]["message"]
        assert answer.json()["error"]["field"] == "state"
        assert client.post("/api/v1/log", json={"run": "a"}).status_code == 400


def log(client: TestClient, key: str | None = None, **row: Any) -> dict[str, Any]:
    found: dict[str, Any] = client.post("/api/v1/log", json=row, headers={"Idempotency-Key": key} if key else {}).json()
    return found


def test_rows_go_to_the_newest_attempt_and_run_of_an_agent(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for run, attempt, first, last in (("a1", 1, 1, 100), ("a1", 2, 91, 120), ("a2", 3, 1, 5)):
            told = Event(kind="state", time=1.7e9, data={"state": "starting", "start_step": first})
            values = {"loss": [1.0] * (last - first + 1)}
            sent = frame(values, run=run, project="default", name="a", attempt=attempt, first_step=first, events=[told])
            send(client, sent)
            assert log(client, run="a", step=last, metrics={"eval": attempt})["run"] == run
            answer = series(client, run, "eval")
            assert (answer["step"], answer["mean"]) == ([last], [attempt])


def test_rows_that_a_full_disk_refused_use_no_step_up(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        writer = client.app.state.services.ingest  # type: ignore[attr-defined]
        accept = writer.accept

        async def refuse(_frames: object, *, limited: bool) -> None:
            raise StorageFull("no space")

        for step in (1, 2):
            writer.accept = refuse
            assert client.post("/api/v1/log", json={"run": "a", "metrics": {"x": 1}}).status_code == 507
            writer.accept = accept
            assert log(client, run="a", metrics={"x": 1})["step"] == step


def test_ranks_that_each_tell_their_start_are_one_run(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        first = {log(client, run="a", rank=rank, state="starting")["run"] for rank in (0, 1, 2)}
        assert len(first) == 1
    with api(tmp_path) as client:  # also after a restart of the server
        first |= {log(client, run="a", rank=3, state="starting")["run"]}
        assert len(first) == 1
        again = {log(client, run="a", rank=rank, state="starting")["run"] for rank in (1, 0)}
        assert len(again) == 1
        assert not first & again
        for rank in (0, 1):
            log(client, run="a", rank=rank, state="finished")
        after_the_end = log(client, run="a", rank=2, state="starting")["run"]
        assert after_the_end not in first | again


def test_projects_may_use_the_same_idempotency_key(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        runs = [
            log(client, key="1", project=project, run="a", metrics={"x": 1})["run"] for project in ("p", "q", "p", "q")
        ]
        assert (runs[:2], len(set(runs))) == (runs[2:], 2)


def test_a_retry_does_not_bring_a_deleted_run_back(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        run = log(client, key="1", run="a", metrics={"x": 1})["run"]
        assert client.delete(f"/api/v1/runs/{run}", headers=ADMIN).status_code == 204
        again = log(client, key="1", run="a", metrics={"x": 1})
        assert (again["stored"], again["duplicate"]) == (0, 1)
        assert client.get("/api/v1/runs").json()["runs"] == []
        assert log(client, key="2", run="a", metrics={"x": 1})["run"] != run
