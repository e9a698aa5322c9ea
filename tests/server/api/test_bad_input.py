"""No input is the server's fault: whatever is sent, the answer is below 500 and in our shape."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from fastapi.testclient import TestClient

CHANNEL = "url, name, kind, secret, min_severity, projects, tags, group_s, repeat_s, summaries, every_s"
JSON = {**ADMIN, "Content-Type": "application/json"}
HUGE = "9" * 5000
TEXTS = [
    "",
    "%00",
    "%ff",
    "%ed%a0%80",
    "NaN",
    "-1",
    HUGE[:300],
    "1e999",
    "../../etc/passwd",
    "%2e%2e%2f",
    "<script>",
    "'; DROP TABLE run;--",
    "\u202e",
]

BODIES: list[bytes] = [
    b"",
    b"null",
    b"NaN",
    b"[]",
    b"{",
    b'{"name": NaN}',
    b'{"name": 1e999}',
    b'{"name": "\\ud800"}',
    b'{"tags": ["\\udfff"]}',
    b'{"tags": "text"}',
    b'{"name": ["a"]}',
    b'{"notes": ' + HUGE.encode() + b"}",
    b'{"scope": "\\ud800"}',
    b'{"scope": "root"}',
    b'{"scope": "read", "expires_in_s": NaN}',
    b'{"scope": "read", "expires_in_s": 1e999}',
    b'{"scope": "read", "expires_in_s": -1}',
    b'{"scope": "read", "expires_in_s": "Infinity"}',
    b'{"scope": "read", "name": "' + b"x" * 1000 + b'"}',
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"\xff\xfe",
    b'{"name": "\xff"}',
    b'{"\\ud800": 1}',
    b'{"' + b"x" * 100_000 + b'": 1}',
]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("bad")) as running:
        send(running, frame({"loss": [1.0, 2.0]}))
        send(running, frame({"loss": [1.0]}, run="kept"))  # the other one is deleted on the way
        yield running


def fine(answer: Any) -> None:
    assert answer.status_code < 500, f"{answer.request.method} {answer.request.url}: {answer.text[:500]}"
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert isinstance(error["code"], str)
        assert error["message"]


QUERIES = [
    "/api/v1/runs?limit={}",
    "/api/v1/runs?cursor={}",
    "/api/v1/runs?state={}",
    "/api/v1/runs?tag={}",
    "/api/v1/runs?project={}&name={}",
    "/api/v1/runs/{}",
    "/api/v1/runs/{}/latest",
    "/api/v1/runs/r1/series?name={}",
    "/api/v1/runs/r1/series?name=loss&from={}",
    "/api/v1/runs/r1/series?name=loss&to={}",
    "/api/v1/runs/r1/series?name=loss&points={}",
    "/api/v1/runs/r1/series?name=loss&rank={}",
    "/api/v1/runs/r1/ranks?name={}&points={}",
    "/api/v1/runs/r1/events?kind={}",
    "/api/v1/runs/r1/events?limit={}",
    "/api/v1/runs/r1/events?before={}",
    "/api/v1/runs/r1/export?format={}",
    "/api/v1/{}",
    "/api/{}",
    "/docs/{}",
    "/login?token={}",
]


@pytest.mark.fault
@pytest.mark.parametrize("query", QUERIES)
def test_x01_odd_queries_and_paths_are_answered_below_500(client: TestClient, query: str) -> None:
    client.app.state.access.failures.__init__()  # type: ignore[attr-defined]
    client.app.state.access.guesses.__init__()  # type: ignore[attr-defined] - /login counts its refusals
    for text in [*TEXTS, HUGE]:
        answer = client.get(query.replace("{}", text))
        if answer.headers.get("content-type", "").startswith("text/html"):
            assert answer.status_code in (200, 303, 401, 429)
        else:
            fine(answer)


STEPS = [0, -1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**30]


@pytest.mark.parametrize("step", STEPS)
def test_steps_at_the_edges_of_integers(client: TestClient, step: int) -> None:
    for path in ("series", "ranks"):
        for which in ("from", "to"):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                fine(client.get(f"/api/v1/runs/r1/{path}", params={"name": "loss", which: step}))


@pytest.mark.fault
@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("PATCH", "/api/v1/runs/r1"),
        ("POST", "/api/v1/keys"),
        ("POST", "/api/v1/log"),
        ("POST", "/login"),
        ("POST", "/api/v1/session/links"),
    ],
)
def test_x01_odd_bodies_are_answered_below_500(client: TestClient, method: str, path: str, body: bytes) -> None:
    client.app.state.access.failures.__init__()  # type: ignore[attr-defined]
    client.app.state.access.guesses.__init__()  # type: ignore[attr-defined]
    answer = client.request(method, path, content=body, headers={**ADMIN, "Content-Type": "application/json"})
    if path == "/login":
        assert answer.status_code < 500
    else:
        fine(answer)


@pytest.mark.fault
@pytest.mark.parametrize("path", ["/api/v1/runs/r1", "/api/v1/keys", "/api/v1/log", "/api/v1/ingest"])
def test_x01_odd_media_types_are_answered_below_500(client: TestClient, path: str) -> None:
    for media in (
        "",
        "text/plain",
        "application/json; charset=utf-7",
        "multipart/form-data",
        "multipart/form-data; boundary=x",
        "\xff",
        "application/x-www-form-urlencoded",
    ):
        for method in ("PATCH", "POST", "PUT", "DELETE"):
            fine(
                client.request(method, path, content=b"x=1", headers={**ADMIN, "Content-Type": media.encode("latin-1")})
            )


def test_unknown_api_paths_are_json_404_and_wrong_methods_405(client: TestClient) -> None:
    for path in ("/api", "/api/", "/api/v1", "/api/v1/", "/api/v1/nothing", "/api/v2/runs", "/api/v1/runs/r1/nothing"):
        answer = client.get(path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["code"] == "not_found"
    answer = client.get("/api/v1/ingest")
    assert answer.status_code == 405
    assert answer.headers["allow"] == "POST"


@pytest.mark.fault
def test_x01_odd_authorization_headers_are_answered_below_500(client: TestClient) -> None:
    for value in (
        "",
        "Bearer",
        "Bearer ",
        "Basic x",
        "Bearer pfa_",
        "Bearer pfa_read_a_b",
        "Bearer " + "x" * 5000,
        "Bearer \xff",
        "\xff",
    ):
        client.app.state.access.failures.__init__()  # type: ignore[attr-defined]
        client.app.state.access.guesses.__init__()  # type: ignore[attr-defined]
        answer = client.get("/api/v1/runs", headers={"Authorization": value.encode("latin-1")})
        assert answer.status_code == 401, value
        fine(answer)


def test_the_message_names_the_mistake_and_not_the_library(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}, run="known"))
    broken = client.patch("/api/v1/runs/known", content=b"{", headers={"Content-Type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "bad_request")
    assert "not valid JSON" in broken.json()["error"]["message"]
    rank = client.get("/api/v1/runs/known/series", params={"name": "loss", "rank": "first"})
    assert (rank.status_code, rank.json()["error"]["field"]) == (422, "rank")
    assert "allowed are all and 0" in rank.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "misspelt", "allowed"),
    [
        ("POST", "channels", {"url": "https://8.8.8.8/", "min_severty": "critical"}, "min_severty",
         CHANNEL),
        ("POST", "channels", {"ulr": "https://8.8.8.8/"}, "ulr", CHANNEL),
        ("PATCH", "runs/kept", {"state": "failed"}, "state", "name, tags, notes, rules_off"),
        ("POST", "keys", {"scope": "read", "expires": 60}, "expires", "scope, name, project, expires_in_s, limits"),
        ("POST", "alerts/none/mute", {"for_ss": 60}, "for_ss", "for_s, note"),
    ],
)  # fmt: skip
def test_a_field_that_a_body_does_not_have_is_refused_by_name(
    client: TestClient, method: str, path: str, body: dict[str, Any], misspelt: str, allowed: str
) -> None:
    answer = client.request(method, f"/api/v1/{path}", content=json.dumps(body), headers=JSON)
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert (error["field"], error["message"]) == (
        misspelt,
        f"the body has no field '{misspelt}'; allowed are {allowed}",
    )
    assert client.get("/api/v1/runs/kept").json()["name"] == "kept"


BODIES_OF_ROUTES = [
    ("POST", "log"), ("POST", "channels"), ("PATCH", "runs/kept"), ("POST", "keys"), ("POST", "runs/kept/commands"),
    ("POST", "alerts/none/mute"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), BODIES_OF_ROUTES)
@pytest.mark.parametrize("media_type", ["application/x-www-form-urlencoded", "text/plain"])
def test_json_under_another_content_type_is_415_everywhere(
    client: TestClient, method: str, path: str, media_type: str
) -> None:
    sent = {**ADMIN, "Content-Type": f"{media_type}; charset=utf-8"}
    answer = client.request(method, f"/api/v1/{path}", content=b'{"run": "a"}', headers=sent)
    assert answer.status_code == 415, answer.text
    assert answer.json()["error"] == {
        "code": "unsupported_media_type", "field": "content-type",
        "message": f"Content-Type is '{media_type}'; application/json is needed (curl: -H 'Content-Type: application/json')",
    }  # fmt: skip


@pytest.mark.parametrize(("method", "path"), BODIES_OF_ROUTES[1:])
@pytest.mark.parametrize("body", ["[]", "3", '"text"'])
def test_a_body_that_is_no_object_is_refused_in_our_words(
    client: TestClient, method: str, path: str, body: str
) -> None:
    answer = client.request(method, f"/api/v1/{path}", content=body, headers=JSON)
    assert answer.status_code == 422
    assert answer.json()["error"] == {"code": "invalid", "field": "body", "message": "the body must be a JSON object"}


def test_a_body_that_is_missing_is_asked_for(client: TestClient) -> None:
    answer = client.patch("/api/v1/runs/kept")
    assert (answer.status_code, answer.json()["error"]["message"]) == (422, "the body must be a JSON object")
    unnamed = client.patch("/api/v1/runs/kept", content=b'{"name": "b"}')
    assert (unnamed.status_code, unnamed.json()["error"]["field"]) == (415, "content-type")
    assert "Content-Type is missing" in unnamed.json()["error"]["message"]
