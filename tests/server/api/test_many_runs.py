"""What is asked about many runs at once costs as many statements as for a few."""

from __future__ import annotations

import contextlib
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
        send(client, frame({"loss": [float(number), 1.0]}, run=f"r{number}", events=[began, context]))
        rows.append({
            "id": f"a{number}", "run": f"r{number}", "rule": "data_bound", "severity": "warning", "state": "firing",
            "title": "", "message": "", "since": 1.0, "gain_pct": 50.0,
        })  # fmt: skip
    database = client.app.state.services.database  # type: ignore[attr-defined]
    database.write(lambda connection: connection.execute(insert(alert), rows))


@pytest.mark.parametrize(
    "path", ["/alerts", "/alerts?state=firing", "/runs", "/runs?severity=warning&q=r", "/deliveries", "/audit"]
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
