"""POST /api/v1/ingest: stored once, answered after the commit, refused with a sentence."""

from __future__ import annotations

import inspect
import zlib
from pathlib import Path

import pytest
from api_builders import ADMIN, MSGPACK, api, frame, send
from fastapi.routing import APIRoute
from sqlalchemy import text

from perfagent.wire import encode
from perfagent_server.database import QueueFull, StorageFull
from perfagent_server.routes import ingest


def test_a_frame_is_stored_once_and_a_repeat_is_counted_as_duplicate(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        sent = frame({"loss": [3.0, 2.0, float("nan")], "lr": [0.1, 0.1, 0.1]})
        assert send(client, sent) == {"stored": 6, "duplicate": 0, "rejected": [], "commands": []}
        assert send(client, sent) == {"stored": 0, "duplicate": 6, "rejected": [], "commands": []}
        series = client.get("/api/v1/runs/r1/series", params={"name": "loss"}).json()
        assert series["step"] == [1, 2, 3]
        assert series["mean"] == [3.0, 2.0, "NaN"]
        assert series["exact"] is True


def test_no_step_of_ingest_waits_for_a_worker_thread() -> None:
    (route,) = (route for route in ingest.router.routes if isinstance(route, APIRoute))
    waiting = [route.dependant]
    while waiting:
        dependant = waiting.pop()
        assert inspect.iscoroutinefunction(dependant.call), dependant.call
        waiting += dependant.dependencies


def test_a_deflated_frame_is_taken(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        body = zlib.compress(encode(frame({"loss": [1.0] * 1000})))
        answer = client.post("/api/v1/ingest", content=body, headers={**MSGPACK, "Content-Encoding": "deflate"})
        assert answer.json()["stored"] == 1000


def test_the_limit_of_bytes_counts_what_a_body_unpacks_to(tmp_path: Path) -> None:
    with api(tmp_path, bytes_per_s=5_000) as client:  # and ten seconds of it at once
        body = zlib.compress(encode(frame({"loss": [1.0] * 10_000})), 9)
        assert len(body) < 50_000
        headers = {**MSGPACK, "Content-Encoding": "deflate"}
        statuses = [client.post("/api/v1/ingest", content=body, headers=headers).status_code for _ in range(2)]
        assert statuses == [200, 429]


def test_what_was_acknowledged_is_committed(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}))
        with client.app.state.services.database.engine.connect() as connection:  # type: ignore[attr-defined]
            assert connection.execute(text("SELECT count(*) FROM ledger")).scalar() == 1


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"", {}, 400),
        (b"\xc1", {}, 400),
        (b"\x80", {}, 400),
        (b"not msgpack at all", {}, 400),
        (b"\x91" * 100_000, {}, 400),
        (b"\x81\xa7version\x63", {}, 400),
        (encode(frame({"loss": [1.0]}))[:-3], {}, 400),
        (encode(frame({"loss": [1.0]}, run="a/b")), {}, 400),
        (encode(frame({"loss": [1.0]}, run="")), {}, 400),
        (encode(frame({"loss": [1.0]})), {"Content-Type": "text/html"}, 415),
        (encode(frame({"loss": [1.0]})), {"Content-Encoding": "gzip"}, 415),
        (encode(frame({"loss": [1.0]})), {"Content-Encoding": "deflate"}, 400),
        (zlib.compress(b"\0" * 40_000_000), {"Content-Encoding": "deflate"}, 413),
        (b"\0" * (8 * 2**20 + 1), {}, 413),
    ],
)
def test_a_body_that_is_no_frame_is_refused_with_a_sentence(
    tmp_path: Path, body: bytes, headers: dict[str, str], status: int
) -> None:
    with api(tmp_path) as client:
        answer = client.post("/api/v1/ingest", content=body, headers={**MSGPACK, **headers})
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["code"] and len(error["message"]) > 10
        assert client.get("/api/v1/runs").json()["runs"] == []


@pytest.mark.parametrize(("error", "status"), [(QueueFull("too much waits"), 503), (StorageFull("no space"), 507)])
def test_a_busy_server_and_a_full_disk_tell_when_to_come_back(tmp_path: Path, error: Exception, status: int) -> None:
    with api(tmp_path) as client:
        writer = client.app.state.services.ingest  # type: ignore[attr-defined]

        async def refuse(_frames: object, *, limited: bool) -> None:
            raise error

        writer.accept = refuse  # the writer's own tests fill a real disk and a real queue
        waits = set()
        for _ in range(20):
            answer = client.post("/api/v1/ingest", content=encode(frame({"loss": [1.0]})), headers=MSGPACK)
            assert answer.status_code == status
            waits.add(int(answer.headers["Retry-After"]))
        assert min(waits) >= 5
        assert len(waits) > 1, "every agent would come back in the same second"


def test_a_key_of_one_project_sends_to_no_other(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        made = client.post("/api/v1/keys", json={"scope": "ingest", "project": "mine"}, headers=ADMIN).json()
        headers = {**MSGPACK, "Authorization": f"Bearer {made['key']}"}
        mine = client.post("/api/v1/ingest", content=encode(frame({"loss": [1.0]}, project="mine")), headers=headers)
        other = client.post(
            "/api/v1/ingest", content=encode(frame({"loss": [1.0]}, project="other", run="r2")), headers=headers
        )
        assert (mine.status_code, other.status_code) == (200, 403)
        row = client.post(
            "/api/v1/log",
            json={"project": "other", "run": "x", "metrics": {"a": 1}},
            headers=headers | {"Content-Type": "application/json"},
        )
        assert row.status_code == 403
