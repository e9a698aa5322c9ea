"""What is answered before the framework is answered as the framework would."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_builders import ADMIN, MSGPACK, api, frame
from fastapi.testclient import TestClient

from perfagent.wire import encode
from perfagent_server.database import QueueFull
from perfagent_server.routes import fast_path

JSON = {"Content-Type": "application/json"}
CASES: dict[str, tuple[str, bytes, dict[str, str]]] = {
    "frame": ("ingest", encode(frame({"loss": [1.0]})), MSGPACK),
    "deflated": ("ingest", zlib.compress(encode(frame({"loss": [1.0]}))), {**MSGPACK, "Content-Encoding": "deflate"}),
    "no frame": ("ingest", b"nothing", MSGPACK),
    "unknown encoding": ("ingest", b"", {**MSGPACK, "Content-Encoding": "br"}),
    "bomb": ("ingest", zlib.compress(bytes(10_000_000)), {**MSGPACK, "Content-Encoding": "deflate"}),
    "media type": ("ingest", b"", {"Content-Type": "text/html"}),
    "too large": ("ingest", bytes(5000), MSGPACK),
    "bad key": ("ingest", encode(frame({"loss": [1.0]})), {**MSGPACK, "Authorization": "Bearer wrong"}),
    "foreign host": ("ingest", b"", {**MSGPACK, "Host": "evil.example"}),
    "foreign page": ("ingest", b"", {**MSGPACK, "Origin": "http://evil.example"}),
    "rank": ("ingest", encode(frame({"loss": [1.0]}, rank=70_000)), MSGPACK),
}


def same(answer: httpx.Response) -> tuple[int, Any, dict[str, str]]:
    own = ("retry-after", "x-request-id")
    headers = {name: value for name, value in answer.headers.items() if name not in own}
    return answer.status_code, answer.json(), headers


@pytest.mark.parametrize("case", CASES)
def test_both_ways_answer_the_same(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    route, body, headers = CASES[case]
    answers, answered = [], []
    fast = fast_path.authorize

    async def counted(*arguments: Any) -> Any:
        answered.append(arguments)
        return await fast(*arguments)

    monkeypatch.setattr(fast_path, "authorize", counted)
    for way, query in (("fast", ""), ("framework", "?by=framework")):
        with api(tmp_path / way, max_body_bytes=20_000 if case == "bomb" else 4000) as client:
            answers.append(same(client.post(f"/api/v1/{route}{query}", content=body, headers=headers)))
    assert answers[0] == answers[1]
    assert len(answered) <= 1, "the framework's way went the fast one"
    reached = case not in ("too large", "foreign host", "foreign page")
    assert len(answered) == reached


def test_a_query_that_log_does_not_have_is_refused(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        answer = client.post("/api/v1/log?dry=1", json={"run": "a", "metrics": {"x": 1}})
        assert answer.status_code == 422
        assert client.post("/api/v1/log", json={"run": "a", "metrics": {"x": 1}}).status_code == 200


def test_a_long_answer_is_compressed_where_the_sender_takes_that(tmp_path: Path) -> None:
    row = {"run": "a", "metrics": {f"bad\n{at}": 1.0 for at in range(200)}}
    with api(tmp_path) as client:
        plain = client.post("/api/v1/log", json=row, headers={"Accept-Encoding": "identity"})
        packed = client.post("/api/v1/log", json=row, headers={"Accept-Encoding": "gzip"})
        assert "content-encoding" not in plain.headers
        assert packed.headers["content-encoding"] == "gzip"
        assert len(packed.json()["rejected"]) == len(plain.json()["rejected"]) == 200


def test_a_fault_of_ours_is_500_in_our_shape_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with api(tmp_path) as client:
        services = client.app.state.services  # type: ignore[attr-defined]

        async def broken(*_: object, **__: object) -> None:
            raise ZeroDivisionError("a bug")

        services.ingest.accept = broken
        quiet = TestClient(client.app, base_url="http://127.0.0.1:8420", raise_server_exceptions=False)
        answer = quiet.post("/api/v1/ingest", content=encode(frame({"loss": [1.0]})), headers=MSGPACK)
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal"
        assert "a bug" in caplog.text


def test_a_busy_server_says_when_to_come_back(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        services = client.app.state.services  # type: ignore[attr-defined]

        async def busy(*_: object, **__: object) -> None:
            raise QueueFull("too much waits")

        services.ingest.accept = busy
        answer = client.post("/api/v1/ingest", content=encode(frame({"loss": [1.0]})), headers=MSGPACK)
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_both_routes_stand_in_the_schema(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert "application/x-msgpack" in json.dumps(paths["/api/v1/ingest"]["post"]["requestBody"])
        assert "post" in paths["/api/v1/log"]
        assert client.get("/api/v1/ingest", headers=ADMIN).status_code == 405
