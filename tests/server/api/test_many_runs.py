"""What is asked about many runs at once costs as many statements as for a few."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from api_builders import ADMIN, api, frame, send
from fastapi.testclient import TestClient
from sqlalchemy import Engine, event, insert

from perfagent.wire import Event
from perfagent_server.store.tables import alert


@contextlib.contextmanager
def statements() -> Iterator[list[str]]:
    """Those that go through SQLAlchemy, but not those of the server's own threads."""
    seen: list[str] = []

    def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
        if not threading.current_thread().name.startswith("perfagent"):
            seen.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(Engine, "before_cursor_execute", note)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path) as client:
        yield client


def add_runs(client: TestClient, first: int, last: int) -> None:
    rows = []
    for number in range(first, last):
        context = Event(kind="context", time=1.0, step=0, data={"cores": 8, "gpus": 1})
        began = Event(kind="state", time=1_700_000_000.0, step=0, data={"state": "running"})
        send(client, frame({"loss": [1.0, float(number)]}, run=f"r{number}", events=[began, context]))
        rows.append({
            "id": f"a{number}", "run": f"r{number}", "rule": "data_bound", "severity": "warning", "state": "firing",
            "title": "", "message": "", "since": 1.0, "gain_pct": 50.0,
        })  # fmt: skip
    database = client.app.state.services.database  # type: ignore[attr-defined]
    database.write(lambda connection: connection.execute(insert(alert), rows))


@pytest.mark.parametrize(
    "path",
    [
        "/alerts",
        "/alerts?state=firing",
        "/runs",
        "/runs?severity=warning&q=r",
        "/runs?with=&sort=loss&limit=2",
        "/runs?with=&sort=config:lr&limit=2",
        "/deliveries",
        "/audit",
    ],
)
def test_a_list_asks_as_often_for_many_runs_as_for_few(client: TestClient, path: str) -> None:
    priced = {"gpu_hour": 2.0, "cpu_core_hour": 0.1, "currency": "EUR"}
    assert client.put("/api/v1/prices", json=priced, headers=ADMIN).status_code == 200
    counts = []
    for first, last in ((0, 2), (2, 12)):
        add_runs(client, first, last)
        with statements() as seen:
            assert client.get(f"/api/v1{path}", headers=ADMIN).status_code == 200
        counts.append(len(seen))
    assert counts[0] == counts[1]


def test_a_table_sorted_by_a_metric_reads_no_configuration_of_runs_that_it_does_not_show(client: TestClient) -> None:
    add_runs(client, 0, 30)
    read = []

    def note(_connection: object, cursor: sqlite3.Cursor, statement: str, *_: object) -> None:
        if "config" in statement:
            read.append(statement)

    event.listen(Engine, "before_cursor_execute", note)
    try:
        asked = {"with": "latest", "sort": "loss", "order": "desc", "limit": 2}
        shown = client.get("/api/v1/runs", params=asked).json()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert [row["run"] for row in shown["runs"]] == ["r29", "r28"]
    assert all(" IN " in statement for statement in read), "only of the rows that are shown"


@pytest.mark.parametrize("compacts", [False, True])
def test_a_table_is_sorted_by_the_values_that_it_shows(client: TestClient, compacts: bool) -> None:
    for number, values in enumerate(([1.0, 7.0], [5.0], [2.0, "NaN"], [9.0, 3.0])):
        send(client, frame({"train_loss": [float(value) for value in values]}, run=f"one{number}"))
    for rank, value in enumerate((4.0, 8.0)):
        send(client, frame({"loss": [value], "samples_per_s": [value]}, run="ranks", rank=rank, source=f"ranks{rank}"))
    send(client, frame({"loss": [1.0, 2.0, 3.0, 4.0]}, run="again"))
    start = Event(kind="state", time=1_700_000_001.0, step=0, data={"state": "running", "start_step": 2})
    send(client, frame({"loss": [6.5]}, run="again", attempt=2, first_step=2, events=[start]))
    if compacts:
        client.app.state.services.compactor.run_once(everything=True)  # type: ignore[attr-defined]
    asked = {"with": "latest", "sort": "loss", "order": "desc"}
    rows = client.get("/api/v1/runs", params=asked).json()["runs"]
    assert [row["run"] for row in rows[:5]] == ["one0", "again", "ranks", "one1", "one3"]
    shown = [row["latest"][row["loss"]] for row in rows[:5]]
    assert shown == sorted(shown, reverse=True)
    assert rows[5]["run"] == "one2"
