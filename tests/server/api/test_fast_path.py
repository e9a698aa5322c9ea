"""POST /api/v1/ingest and /log: stored once, answered after the commit, and what is answered before the framework is
answered as the framework would."""

from __future__ import annotations

import inspect
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_builders import ADMIN, MSGPACK, api, frame, send, services_of
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sqlalchemy import text

from perfagent.wire import encode
from perfagent_server.database import QueueFull, StorageFull
from perfagent_server.routes import fast_path, ingest

DEFLATED = {**MSGPACK, "Content-Encoding": "deflate"}
FRAME = encode(frame({"loss": [1.0]}))
CASES: dict[str, tuple[int, bytes, dict[str, str]]] = {
    "frame": (200, FRAME, MSGPACK),
    "deflated": (200, zlib.compress(FRAME), DEFLATED),
    "no frame": (400, b"nothing", MSGPACK),
    "not deflated": (400, FRAME, DEFLATED),
    "unknown encoding": (415, b"", {**MSGPACK, "Content-Encoding": "br"}),
    "bomb": (413, zlib.compress(bytes(10_000_000)), DEFLATED),
    "media type": (415, b"", {"Content-Type": "text/html"}),
    "too large": (413, bytes(20_001), MSGPACK),
    "bad key": (401, FRAME, {**MSGPACK, "Authorization": "Bearer wrong"}),
    "foreign host": (403, b"", {**MSGPACK, "Host": "evil.example"}),
    "foreign page": (403, b"", {**MSGPACK, "Origin": "http://evil.example"}),
    "rank": (422, encode(frame({"loss": [1.0]}, rank=70_000)), MSGPACK),
}
ROW = {"run": "a", "metrics": {"x": 1}}


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TestClient]]:
    """A server that is asked by the fast path, and one by the framework."""
    folder = tmp_path_factory.mktemp("ways")
    with api(folder / "fast", max_body_bytes=20_000) as fast, api(folder / "slow", max_body_bytes=20_000) as slow:
        yield {"": fast, "?by=framework": slow}


@pytest.fixture
def client(ways: dict[str, TestClient]) -> TestClient:
    return ways[""]


@pytest.mark.parametrize("case", CASES)
def test_both_ways_answer_the_same(ways: dict[str, TestClient], case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    status, body, headers = CASES[case]
    answers, fast = [], []
    authorize = fast_path.authorize

    async def counted(*arguments: Any) -> Any:
        fast.append(arguments)
        return await authorize(*arguments)

    monkeypatch.setattr(fast_path, "authorize", counted)
    for query, client in ways.items():
        answer = client.post(f"/api/v1/ingest{query}", content=body, headers=headers)
        told = {name: value for name, value in answer.headers.items() if name not in ("retry-after", "x-request-id")}
        answers.append((answer.status_code, answer.json(), told))
    assert answers[0] == answers[1]
    assert answers[0][0] == status
    if status >= 400:
        error = answers[0][1]["error"]
        assert error["code"] and len(error["message"]) > 10
    assert len(fast) == (case not in ("too large", "foreign host", "foreign page")), (
        "the framework's way went the fast one"
    )


def test_a_frame_is_stored_once_and_committed_before_its_answer(client: TestClient) -> None:
    sent = frame({"loss": [3.0, 2.0, float("nan")], "lr": [0.1, 0.1, 0.1]}, run="once")
    for stored in (6, 0):
        assert send(client, sent) == {"stored": stored, "duplicate": 6 - stored, "rejected": [], "commands": []}
        with services_of(client).database.engine.connect() as connection:
            counted = text("SELECT count(*) FROM ledger WHERE source = 'once-1-0'")
            assert connection.execute(counted).scalar() == 1
    series = client.get("/api/v1/runs/once/series", params={"name": "loss"}).json()
    assert (series["step"], series["mean"], series["exact"]) == ([1, 2, 3], [3.0, 2.0, "NaN"], True)


def test_no_step_of_ingest_waits_for_a_worker_thread() -> None:
    (route,) = (route for route in ingest.router.routes if isinstance(route, APIRoute))
    waiting = [route.dependant]
    while waiting:
        dependant = waiting.pop()
        assert inspect.iscoroutinefunction(dependant.call), dependant.call
        waiting += dependant.dependencies


def test_the_limit_of_bytes_counts_what_a_body_unpacks_to(tmp_path: Path) -> None:
    with api(tmp_path, bytes_per_s=1_000) as client:  # and ten seconds of it at once
        body = zlib.compress(encode(frame({"loss": [1.0] * 2_000})), 9)
        assert len(body) < 10_000
        answers = [client.post("/api/v1/ingest", content=body, headers=DEFLATED).status_code for _ in range(2)]
        assert answers == [200, 429]


def test_a_long_answer_is_compressed_where_the_sender_takes_it(client: TestClient) -> None:
    row = {"run": "a", "metrics": {f"bad\n{at}": 1.0 for at in range(200)}}
    plain, packed = (
        client.post("/api/v1/log", json=row, headers={"Accept-Encoding": encoding}) for encoding in ("identity", "gzip")
    )
    assert (plain.headers.get("content-encoding"), packed.headers["content-encoding"]) == (None, "gzip")
    assert len(packed.json()["rejected"]) == len(plain.json()["rejected"]) == 200


@pytest.mark.parametrize(
    ("error", "status"),
    [(QueueFull("too much waits"), 503), (StorageFull("no space"), 507), (ZeroDivisionError("a bug"), 500)],
)
def test_trouble_of_the_server_is_told_in_our_shape(
    client: TestClient, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(services_of(client).ingest, "accept", refuse)  # its own tests fill a real disk and a real queue
    asking = TestClient(client.app, base_url=str(client.base_url), raise_server_exceptions=False)

    def asked() -> httpx.Response:
        answer = asking.post("/api/v1/ingest", content=FRAME, headers=MSGPACK)
        assert answer.status_code == status
        return answer

    if status == 500:
        assert asked().json()["error"]["code"] == "internal"
        assert "a bug" in caplog.text
        return
    headers = asked().headers
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    waits = {int(asked().headers["Retry-After"]) for _ in range(20)}
    assert min(waits) >= 5
    assert len(waits) > 1, "every agent would come back in the same second"


def test_both_routes_stand_in_the_schema_with_what_they_take(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert "application/x-msgpack" in json.dumps(paths["/api/v1/ingest"]["post"]["requestBody"])
    assert "post" in paths["/api/v1/log"]
    assert client.get("/api/v1/ingest", headers=ADMIN).status_code == 405
    assert client.post("/api/v1/log?dry=1", json=ROW).status_code == 422
    assert client.post("/api/v1/log", json=ROW).status_code == 200
