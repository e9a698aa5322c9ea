"""POST /api/v1/ingest and /log: stored once, answered after the commit, and what is answered before the framework is
answered as the framework would."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import pytest
from api_builders import MSGPACK, api, frame, send, services_of
from fastapi.testclient import TestClient
from sqlalchemy import text

from perfagent.wire import encode
from perfagent_server.database import QueueFull

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
def test_both_ways_answer_the_same(ways: dict[str, TestClient], case: str) -> None:
    status, body, headers = CASES[case]
    answers = []
    for query, client in ways.items():
        answer = client.post(f"/api/v1/ingest{query}", content=body, headers=headers)
        told = {name: value for name, value in answer.headers.items() if name not in ("retry-after", "x-request-id")}
        answers.append((answer.status_code, answer.json(), told))
    assert answers[0] == answers[1]
    assert answers[0][0] == status
    if status >= 400:
        error = answers[0][1]["error"]
        assert error["code"] and len(error["message"]) > 10


def test_a_frame_is_stored_once_and_committed_before_its_answer(client: TestClient) -> None:
    sent = frame({"loss": [3.0, 2.0, float("nan")], "lr": [0.1, 0.1, 0.1]}, run="once")
    for stored in (6, 0):
        assert send(client, sent) == {"stored": stored, "duplicate": 6 - stored, "rejected": [], "commands": []}
        with services_of(client).database.engine.connect() as connection:
            counted = text("SELECT count(*) FROM ledger WHERE source = 'once-1-0'")
            assert connection.execute(counted).scalar() == 1
    series = client.get("/api/v1/runs/once/series", params={"name": "loss"}).json()
    assert (series["step"], series["mean"], series["exact"]) == ([1, 2, 3], [3.0, 2.0, "NaN"], True)


@pytest.mark.parametrize(("error", "status"), [(QueueFull("too much waits"), 503), (ZeroDivisionError("a bug"), 500)])
def test_trouble_of_the_server_is_told_in_our_shape(
    client: TestClient, error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(services_of(client).ingest, "accept", refuse)  # its own tests fill a real disk and a real queue
    asking = TestClient(client.app, base_url=str(client.base_url), raise_server_exceptions=False)
    answers = [asking.post("/api/v1/ingest", content=FRAME, headers=MSGPACK) for _ in range(1 if status == 500 else 20)]
    assert {answer.status_code for answer in answers} == {status}
    if status == 500:
        assert answers[0].json()["error"]["code"] == "internal"
        assert "a bug" in caplog.text
        return
    headers = answers[0].headers
    assert (headers["Cache-Control"], headers["X-Content-Type-Options"]) == ("no-store", "nosniff")
    waits = {int(answer.headers["Retry-After"]) for answer in answers}
    assert min(waits) >= 5
    assert len(waits) > 1, "every agent would come back in the same second"
