"""Media over HTTP: what is refused, and that nothing of what is stored can run in a browser."""

from __future__ import annotations

import json

import pytest
from api_builders import frame, send
from fastapi.testclient import TestClient

from perfagent.wire import Event

PNG = b"\x89PNG\r\n\x1a\n<script>alert(1)</script>"
TABLE = json.dumps({"columns": ["a"], "rows": [["<b>"]], "count": 1}).encode()


def logged(what: str, payload: object, name: str = "samples", **data: object) -> Event:
    return Event(kind="media", time=1.0, step=7, data={"name": name, "what": what, "payload": payload, **data})


def test_media_are_listed_without_their_bytes(client: TestClient) -> None:
    table = logged("table", TABLE, "answers")
    left_out = [Event(kind="media", time=1.0, data={"left_out": count}) for count in (2, 5)]
    send(client, frame({"loss": [1.0]}, events=[logged("image", PNG, caption="a cat"), table, *left_out]))
    listed = client.get("/api/v1/runs/r1/media").json()
    assert [one["name"] for one in listed["names"]] == ["answers", "samples"]
    assert (listed["left_out"], listed["next"]) == (5, None)
    assert client.get("/api/v1/runs/r1").json()["media"] is True
    (image,) = client.get("/api/v1/runs/r1/media", params={"name": "samples", "at": 9}).json()["media"]
    assert (image["caption"], image["step"], image["bytes"]) == ("a cat", 7, len(PNG))
    newest = client.get("/api/v1/runs/r1/media", params={"limit": 1}).json()
    older = client.get("/api/v1/runs/r1/media", params={"before": newest["next"]}).json()
    assert [one["name"] for page in (newest, older) for one in page["media"]] == ["answers", "samples"]
    answer = client.get(image["url"])
    assert answer.content == PNG
    told = answer.headers
    assert told["content-type"] == "image/png"
    assert told["x-content-type-options"] == "nosniff"
    assert told["content-security-policy"] == "default-src 'none'; sandbox"
    assert "immutable" in told["cache-control"]
    assert client.get(image["url"], headers={"If-None-Match": told["etag"]}).status_code == 304
    rows = client.get(newest["media"][0]["url"])
    assert (rows.headers["content-type"], rows.json()["rows"]) == ("application/json", [["<b>"]])
    assert client.get("/api/v1/runs/r1/media/999").status_code == 404


@pytest.mark.parametrize(
    ("what", "payload"),
    [
        ("image", b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>'),
        ("image", b"<!DOCTYPE html><script>alert(1)</script>"),
        ("image", "text"),
        ("image", b"\x89PNG\r\n\x1a\n" + bytes(2**21)),
        ("audio", PNG),
        ("html", b"<p>"),
        ("table", b'{"columns": ["a"], "rows": [[1, 2]], "count": 1}'),
        ("table", b"<html>"),
        ("histogram", b'{"low": 1, "high": 1, "counts": [1], "nonfinite": 0, "count": 1}'),
        ("histogram", b'{"low": 0, "high": 1, "counts": [-1], "nonfinite": 0, "count": 1}'),
    ],
)
def test_what_is_none_of_the_known_types_is_refused_alone(client: TestClient, what: str, payload: object) -> None:
    answer = send(client, frame({"loss": [1.0]}, events=[logged(what, payload), logged("image", PNG)]))
    (rejected,) = answer["rejected"]
    assert (answer["stored"], rejected["name"], rejected["count"]) == (1, "event:media", 1)
    assert len(client.get("/api/v1/runs/r1/media").json()["media"]) == 1
