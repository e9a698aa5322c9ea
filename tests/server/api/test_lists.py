"""Every query parameter that a list of the API documents changes its answer, or is refused with a sentence; and a list
asks the database as often for many rows as for few."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import until
from fastapi.testclient import TestClient
from frames import state
from statements import statements_of

from perfagent.wire import Event

NAN = float("nan")
GIVEN: dict[str, Any] = {
    "project": "other", "name": "b", "state": "finished", "tag": "night", "limit": 1, "with": "verdict", "sort": "name",
    "order": "asc", "severity": "unknown", "q": "night", "group": "sweep", "attention": True, "columns": "config:lr",
    "offset": 1, "since": "2999-01-01T00:00:00Z",
}  # fmt: skip
"""A value of each parameter of GET /runs that lets through some of the runs below, or shows them otherwise."""
LISTS = (
    "users", "channels", "keys", "silences", "alerts", "alerts?state=firing", "deliveries", "audit", "retention", "prices",
    "runs", "runs?severity=critical&q=run", "runs?with=", "runs?with=&sort=loss&limit=2", "runs?with=&sort=config:lr&limit=2",
    *(f"runs/run0/{of}" for of in ("alerts", "events", "commands", "profiles")),
)  # fmt: skip


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("lists")) as client:
        for run, project, values, more in (
            ("a", "p", {"loss": [1.0, 2.0]}, {}), ("b", "other", {"loss": [1.0]}, {"tags": ["night"], "group": "sweep"}),
            ("c", "p", {}, {}),
        ):  # fmt: skip
            begins = state("running", time=1.0, step=0, config={"lr": 0.1}, **more)
            send(client, frame(values, run=run, project=project, name=run, events=[begins]))
        send(client, frame({}, run="b", project="other", seq=2, events=[state("finished", time=2.0, step=1)]))
        until(lambda: client.get("/api/v1/runs/b").json()["severity"] == "healthy")
        yield client


def asked(client: TestClient, **query: Any) -> Any:
    return client.get("/api/v1/runs", params=query, headers=ADMIN)


@pytest.mark.parametrize("parts", [{}, {"with": "latest"}], ids=["runs", "table"])
def test_a_parameter_changes_the_list_of_runs_or_is_refused(client: TestClient, parts: dict[str, str]) -> None:
    documented = client.get("/openapi.json").json()["paths"]["/api/v1/runs"]["get"]["parameters"]
    assert {one["name"] for one in documented} == {*GIVEN, "cursor"}
    refused = set()
    for parameter, value in {**GIVEN, "cursor": asked(client, limit=1).json()["next"]}.items():
        answer = asked(client, **{**parts, parameter: value})
        if answer.status_code == 422:
            assert answer.json()["error"]["field"] == parameter
            refused.add(parameter)
        else:
            assert answer.json() != asked(client, **parts).json(), parameter
    assert refused == ({"cursor"} if parts else {"sort", "order", "offset", "columns"})

    def found(**query: Any) -> list[str]:
        return sorted(row["run"] for row in asked(client, **parts, **query).json()["runs"])

    assert found(state=["running", "starting"]) == ["a", "c"]
    assert found(state=["running", "finished", "starting"]) == ["a", "b", "c"]
    assert found(severity=["unknown", "healthy"]) == ["a", "b", "c"]
    assert found(severity=["unknown"], state=["finished"]) == found(q="nothing") == []


def add(client: TestClient, numbers: range) -> None:
    """Rows of all that there are lists of."""
    for at in numbers:
        project = {"project": f"p{at}"}
        for path, body in (
            ("users", {"name": f"user{at}", "roles": [{"role": "viewer", **project}]}),
            ("channels", {"name": f"hook{at}", "url": f"https://example.org/{at}", "projects": [f"p{at}"]}),
            ("keys", {"scope": "ingest", "name": f"key{at}", **project}),
            ("silences", {"for_s": 3600, "tag": f"tag{at}"}),
        ):
            answer = client.post(f"/api/v1/{path}", json=body, headers=ADMIN)
            assert answer.status_code == 201, answer.text
        begins = [
            state("running", time=1_700_000_000.0, config={"lr": at}),
            Event(kind="context", time=1.0, step=0, data={"cores": 8, "gpus": 1}),
        ]
        send(client, frame({"loss": [float(at), NAN]}, run=f"run{at}", name=f"run{at}", events=begins), **ADMIN)
        client.put("/api/v1/retention", params=project, json={"runs_days": 9}, headers=ADMIN)
        client.put("/api/v1/prices", params=project, json={"gpu_hour": 2, "currency": "EUR"}, headers=ADMIN)
    client.put("/api/v1/prices", json={"gpu_hour": 2.0, "cpu_core_hour": 0.1, "currency": "EUR"}, headers=ADMIN)
    alerts = "/api/v1/alerts?state=firing"
    until(lambda: len(client.get(alerts, headers=ADMIN).json()["alerts"]) == numbers.stop, why="the NaNs are told")


@pytest.mark.sql
def test_a_list_of_many_takes_no_more_statements_than_of_few(tmp_path: Path) -> None:
    took: list[dict[str, int]] = []
    with api(tmp_path) as client:
        engine = services_of(client).database.engine

        def ask(path: str) -> None:
            assert client.get(f"/api/v1/{path}", headers=ADMIN).status_code == 200

        for numbers in (range(2), range(2, 9)):
            add(client, numbers)
            for path in LISTS:
                ask(path)
            took.append({path: len(statements_of(engine, lambda path=path: ask(path))) for path in LISTS})
        shown = statements_of(engine, lambda: ask("runs?with=latest&sort=loss&order=desc&limit=2"))
        about = [sql for sql, _ in shown if "config" in sql]
        assert all(" IN " in sql for sql in about), "of the rows that are shown, and of no other run"
    assert took[0] == took[1]


def test_a_table_is_sorted_by_the_values_that_it_shows(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for number, values in enumerate(([1.0, 7.0], [5.0], [2.0, NAN], [9.0, 3.0])):
            send(client, frame({"train_loss": values}, run=f"one{number}"))
        for rank, value in enumerate((4.0, 8.0)):
            send(client, frame({"loss": [value], "samples_per_s": [value]}, run="ranks", rank=rank))
        send(client, frame({"loss": [1.0, 2.0, 3.0, 4.0]}, run="again"))
        start = [state("running", start_step=2)]
        send(client, frame({"loss": [6.5]}, run="again", attempt=2, first_step=2, events=start))
        for _ in range(2):
            rows = asked(client, **{"with": "latest", "sort": "loss", "order": "desc"}).json()["runs"]
            assert [row["run"] for row in rows] == ["one0", "again", "ranks", "one1", "one3", "one2"]
            shown = [row["latest"][row["loss"]] for row in rows[:5]]
            assert shown == sorted(shown, reverse=True)
            services_of(client).compactor.run_once(everything=True)
