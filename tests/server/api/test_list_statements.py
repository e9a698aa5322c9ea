"""A list asks the database as often for many rows as for few."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from api_builders import ADMIN, MSGPACK, api
from builders import until
from fastapi.testclient import TestClient
from frames import frame, rows
from sqlalchemy import event

from perfagent.wire import encode

NAN = float("nan")
RUN = "run0"
LISTS = (
    "users", "channels", "keys", "silences", "alerts", "deliveries", "audit", "retention", "prices", "runs", "runs?with=",
    f"runs/{RUN}/alerts", f"runs/{RUN}/events", f"runs/{RUN}/commands", f"runs/{RUN}/profiles",
)  # fmt: skip


@contextmanager
def statements(client: TestClient) -> Iterator[list[str]]:
    """Those of routes: the server's own threads have names."""
    found: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if not threading.current_thread().name.startswith("perfagent"):
            found.append(statement)

    engine = client.app.state.services.database.engine  # type: ignore[attr-defined]
    event.listen(engine, "before_cursor_execute", note)
    yield found
    event.remove(engine, "before_cursor_execute", note)


def add(client: TestClient, numbers: range) -> None:
    for at in numbers:
        for path, body in (
            ("users", {"name": f"user{at}", "roles": [{"role": "viewer", "project": f"p{at}"}]}),
            ("channels", {"name": f"hook{at}", "url": f"https://example.org/{at}", "projects": [f"p{at}"]}),
            ("keys", {"scope": "ingest", "name": f"key{at}", "project": f"p{at}"}),
            ("silences", {"for_s": 3600, "tag": f"tag{at}"}),
        ):
            answer = client.post(f"/api/v1/{path}", json=body, headers=ADMIN)
            assert answer.status_code == 201, answer.text
        nan = frame(1, rows({"loss": [2.0, NAN]}, [1, 2]), run=f"run{at}")
        assert client.post("/api/v1/ingest", content=encode(nan), headers=MSGPACK | ADMIN).status_code == 200
        client.put("/api/v1/retention", params={"project": f"p{at}"}, json={"runs_days": 9}, headers=ADMIN)
        client.put(
            "/api/v1/prices", params={"project": f"p{at}"}, json={"gpu_hour": 2, "currency": "EUR"}, headers=ADMIN
        )
    until(
        lambda: len(client.get("/api/v1/alerts", headers=ADMIN).json()["alerts"]) == numbers.stop,
        why="the NaNs are told",
    )


def test_a_list_of_many_takes_no_more_statements_than_one_of_few(tmp_path: Path) -> None:
    took: list[dict[str, int]] = []
    with api(tmp_path) as client:
        for numbers in (range(2), range(2, 9)):
            add(client, numbers)
            took.append({})
            for path in LISTS:
                client.get(f"/api/v1/{path}", headers=ADMIN)
                with statements(client) as found:
                    answer = client.get(f"/api/v1/{path}", headers=ADMIN)
                assert answer.status_code == 200
                took[-1][path] = len(found)
    assert took[0] == took[1]
