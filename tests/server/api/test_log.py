"""POST /api/v1/log: JSON rows become samples like any other."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import api, frame, send
from fastapi.testclient import TestClient
from frames import state

JSON = {"Content-Type": "application/json"}


class Program:
    """A program that logs into a project of its own, by whatever server it is given."""

    def __init__(self, client: TestClient, project: str) -> None:
        self.client, self.project = client, project

    def post(self, *rows: dict[str, Any], key: str | None = None, **row: Any) -> Any:
        body = [{"project": self.project, **one} for one in (rows or ({"run": "a", **row},))]
        headers = {"Idempotency-Key": key} if key else {}
        return self.client.post("/api/v1/log", json=body if rows else body[0], headers=headers)

    def log(self, *rows: dict[str, Any], key: str | None = None, **row: Any) -> dict[str, Any]:
        answer = self.post(*rows, key=key, **row)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def x(self, *values: Any, **row: Any) -> dict[str, Any]:
        """Logs these one after the other; the last answer."""
        return [self.log(metrics={"x": value}, **row) for value in values or (1,)][-1]

    def run_of(self, run: str) -> dict[str, Any]:
        return dict(self.client.get(f"/api/v1/runs/{run}").json())

    def series(self, run: str, name: str = "x", **query: Any) -> dict[str, Any]:
        answer = self.client.get(f"/api/v1/runs/{run}/series", params={"name": name, **query})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def runs(self) -> list[dict[str, Any]]:
        return list(self.client.get("/api/v1/runs", params={"project": self.project}).json()["runs"])


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("log")) as running:
        yield running


@pytest.fixture
def program(client: TestClient, request: pytest.FixtureRequest) -> Program:
    return Program(client, request.node.name[:200])


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[Callable[[], Program]]:
    """Starts the server, and again when it is called again."""
    running = []

    def start() -> Program:
        for one in running:
            one.__exit__(None, None, None)
        running[:] = [api(tmp_path)]
        return Program(running[0].__enter__(), "p")

    yield start
    running[0].__exit__(None, None, None)


@pytest.mark.sql
def test_a_row_creates_the_run_and_the_next_one_continues_it(program: Program) -> None:
    first, second = program.x(2.5), program.x(2.0)
    assert first["run"] == second["run"]
    assert [(one["stored"], one["step"]) for one in (first, second)] == [(1, 1), (1, 2)]
    (run,) = program.runs()
    assert (run["name"], run["step"], run["state"]) == ("a", 2, "running")
    assert program.series(run["run"])["mean"] == [2.5, 2.0]
    bare = program.client.post("/api/v1/log", json={"run": "bare", "metrics": {"x": 1}}).json()["run"]
    assert program.run_of(bare)["project"] == "default"


def test_numbers_that_are_none_arrive_as_they_are(program: Program) -> None:
    given = '"n": NaN, "big": 1e999, "text": "NaN", "up": "Infinity", "down": "-Infinity", "huge": 1' + "0" * 400
    body = f'{{"project": "{program.project}", "run": "a", "metrics": {{{given}}}}}'
    run = program.client.post("/api/v1/log", content=body, headers=JSON).json()["run"]
    latest = program.client.get(f"/api/v1/runs/{run}/latest").json()
    assert {name: item["value"] for name, item in latest.items()} == {
        "n": "NaN", "big": "Infinity", "text": "NaN", "up": "Infinity", "down": "-Infinity", "huge": "Infinity",
    }  # fmt: skip


@pytest.mark.sql
def test_a_retry_with_the_same_key_stores_nothing_again(restarted: Callable[[], Program]) -> None:
    program = restarted()
    first, again = (program.x(key="k1", state="starting") for _ in range(2))
    assert (first["stored"], again["stored"], again["duplicate"]) == (1, 0, 1)
    other = program.post(metrics={"x": 1}, step=9, key="k1")
    assert (other.status_code, other.json()["error"]["field"]) == (422, "idempotency-key")
    program = restarted()
    again = program.x(key="k1", state="starting")
    assert (again["run"], again["stored"], again["duplicate"]) == (first["run"], 0, 1)
    assert Program(program.client, "q").x(key="k1")["run"] != first["run"], "another project may use the same key"
    assert program.x()["step"] == 2
    assert [one["run"] for one in program.runs()] == [first["run"]]


BAD: list[tuple[str | bytes, str]] = [
    *((body, "body") for body in ("", "nonsense", "null", "3", "[" * 100_000, '{"a":' * 100_000, b"\xff\xfe\x00")),
    (b'{"run": "\xff", "metrics": {}}', "body"), ("[3]", "0"), ("[[]]", "0"), ('{"metrics": {}}', "run"),
    ('{"run": "", "metrics": {}}', "run"), ('{"run": 5, "metrics": {}}', "run"),
    (json.dumps({"run": "x" * 257, "metrics": {}}), "run"), ('{"run": "a\\u0000b", "metrics": {}}', "run"),
    ('{"run": "\\ud800", "metrics": {"a": 1}}', "body"), ('{"run": "a", "metrics": {"\\udfff": 1}}', "body"),
    ('{"run": "a"}', "metrics"), ('{"run": "a", "metrics": []}', "metrics"), ('{"run": "a", "state": "done"}', "state"),
    *((f'{{"run": "a", "metrics": {{"x": {value}}}}}', "metrics.x") for value in ("null", "true", '"nan"', "{}")),
    ('{"run": "a", "metrics": {"x": 1' + "0" * 5000 + "}}", "body"),
    *((f'{{"run": "a", "step": {step}, "metrics": {{"x": 1}}}}', "step")
      for step in ('"1"', "1.5", "-1", "NaN", "1e999", "1" + "0" * 40)),
    *((f'{{"run": "a", {field}, "metrics": {{"x": 1}}}}', field[1:].partition('"')[0])
      for field in ('"rank": -1', '"rank": 4294967296', '"time": NaN', '"time": "now"', '"project": ""')),
]  # fmt: skip


def test_a_bad_row_is_refused_with_its_field(client: TestClient) -> None:
    before = [run["run"] for run in client.get("/api/v1/runs").json()["runs"]]
    for body, field in BAD:
        answer = client.post("/api/v1/log", content=body, headers=JSON)
        assert (answer.status_code, answer.json()["error"].get("field", "body")) == (400, field), body[:90]
    rows = [{"run": "a", "metrics": {"x": 1}}, {"run": "a", "metrics": {"x": []}}]
    assert client.post("/api/v1/log", json=rows).json()["error"]["field"] == "1.metrics.x"
    assert client.post("/api/v1/log", json=[]).json()["stored"] == 0
    after = [run["run"] for run in client.get("/api/v1/runs").json()["runs"]]
    assert after == before, "one bad row refuses the list"


@pytest.mark.sql
def test_a_row_tells_settings_tags_and_group_of_its_run(program: Program) -> None:
    """With numbers or without, at the start or later: what is not said again stays, as what an agent says."""
    run = program.log(config={"lr": 1e-3, "model": {"depth": 4}}, tags=["a"])["run"]
    program.log(group="sweep")
    program.x(0.5)
    program.log(metrics={"x": 0.6}, config={"seed": 3}, tags=["b"])
    told = program.run_of(run)
    assert (told["config"], told["tags"], told["group"], told["step"]) == (
        {"lr": 1e-3, "model": {"depth": 4}, "seed": 3}, ["a", "b"], "sweep", 2,
    )  # fmt: skip
    assert told["state"] == "running"
    program.log(state="finished")
    program.log(config={"score": 0.9})
    told = program.run_of(run)
    assert (told["state"], told["config"]["score"]) == ("finished", 0.9), "what comes late does not reopen the run"
    states = program.client.get(f"/api/v1/runs/{run}/events", params={"kind": "state"}).json()["events"]
    assert [one["data"]["state"] for one in states] == ["finished"]


@pytest.mark.parametrize(
    ("field", "value"), [("config", [1]), ("config", {"seed": 2**65}), ("tags", "a"), ("tags", [""]), ("group", 7)]
)
def test_settings_of_another_kind_are_refused(program: Program, field: str, value: Any) -> None:
    answer = program.post(metrics={"x": 1}, **{field: value})
    assert (answer.status_code, answer.json()["error"]["field"]) == (400, field)


def test_each_rank_counts_its_own_steps_also_after_a_restart(restarted: Callable[[], Program]) -> None:
    program = restarted()
    assert [program.x(rank, rank=rank)["step"] for rank in (0, 0, 1, 0)] == [1, 2, 1, 3]
    program = restarted()
    assert [program.x(rank, rank=rank)["step"] for rank in (1, 0, 2)] == [2, 4, 1]
    run = program.runs()[0]["run"]
    found = program.series(run)
    assert (found["min"][0], found["max"][0], found["mean"][0]) == (0.0, 2.0, 1.0)
    assert program.series(run, rank=2)["mean"] == [2.0]


@pytest.mark.sql
def test_rows_go_to_the_newest_attempt_and_run_of_an_agent(program: Program) -> None:
    for run, attempt, first, last in (("a1", 1, 1, 100), ("a1", 2, 91, 120), ("a2", 3, 1, 5)):
        begins = [state("starting", time=1.7e9, start_step=first)]
        about = {"project": program.project, "name": "a", "attempt": attempt, "first_step": first}
        send(program.client, frame({"loss": [1.0] * (last - first + 1)}, run=run, events=begins, **about))
        assert program.log(step=last, metrics={"eval": attempt})["run"] == run
        answer = program.series(run, "eval")
        assert (answer["step"], answer["mean"]) == ([last], [attempt])


@pytest.mark.parametrize("ends", ["finished", "failed", "oom"])
def test_a_row_tells_how_its_run_ended(program: Program, ends: str) -> None:
    run = program.x()["run"]
    answer = program.log(state=ends, reason="the disk is full")
    assert (answer["run"], answer["step"], answer["stored"]) == (run, 1, 0)
    found = program.run_of(run)
    said = found["state"], found["step"], found["reason"], found["ended"] is None
    assert said == (ends, 1, "the disk is full", False)
    late = program.log(metrics={"test/accuracy": 0.9})
    assert (late["run"], program.run_of(run)["state"]) == (run, ends), "a result after the end is of this run"


@pytest.mark.sql
def test_starting_begins_a_new_run_of_the_name(restarted: Callable[[], Program]) -> None:
    program = restarted()
    first = program.x(1.0, state="finished")["run"]
    rows = [{"run": "a", "state": "starting"}, *({"run": "a", "metrics": {"x": value}} for value in (5.0, 4.0))]
    second = program.log(*rows)["run"]
    assert second == program.x(3.0)["run"] != first
    assert program.run_of(second)["meta"] == {}
    assert [program.run_of(run)["state"] for run in (first, second)] == ["finished", "running"]
    assert [program.series(run)["mean"] for run in (first, second)] == [[1.0], [5.0, 4.0, 3.0]]
    told = zip(("starting", "finished"), (1.7e9, 1.7e9 + 60), strict=True)
    third = program.log(*({"run": "a", "state": state, "time": time} for state, time in told))["run"]
    found = program.run_of(third)
    assert (found["started"], found["ended"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:14:20.000Z")
    assert restarted().x()["run"] == third, "the newest is the one begun last, whenever it ran"
