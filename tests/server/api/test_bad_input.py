"""No input is the server's fault: whatever is sent, the answer is below 500 and in our shape."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from fastapi.testclient import TestClient

from perfagent_server.security.failures import Failures

CHANNEL = "url, name, kind, secret, min_severity, projects, tags, group_s, repeat_s, summaries, every_s"
JSON = {**ADMIN, "Content-Type": "application/json"}
HUGE = "9" * 5000
TEXTS = (
    "", "%00", "%ff", "%ed%a0%80", "NaN", "-1", HUGE[:300], HUGE, "1e999", "../../etc/passwd", "%2e%2e%2f", "<script>",
    "'; DROP TABLE run;--", "\u202e",
)  # fmt: skip
QUERIES = (
    "runs?limit={}", "runs?cursor={}", "runs?state={}", "runs?tag={}", "runs?project={}&name={}", "runs/{}",
    "runs/{}/latest", "runs/r1/series?name={}", "runs/r1/series?name=loss&from={}", "runs/r1/series?name=loss&to={}",
    "runs/r1/series?name=loss&points={}", "runs/r1/series?name=loss&rank={}", "runs/r1/ranks?name={}&points={}",
    "runs/r1/events?kind={}", "runs/r1/events?limit={}", "runs/r1/events?before={}", "runs/r1/export?format={}", "{}",
    "../{}", "../../docs/{}", "../../login?token={}",
)  # fmt: skip
BODIES = (
    b"", b"null", b"NaN", b"[]", b"{", b'{"name": NaN}', b'{"name": 1e999}', b'{"name": "\\ud800"}', b'{"tags": ["\\udfff"]}',
    b'{"tags": "text"}', b'{"name": ["a"]}', b'{"notes": ' + HUGE.encode() + b"}", b'{"scope": "\\ud800"}',
    b'{"scope": "root"}', *(b'{"scope": "read", "expires_in_s": %s}' % one for one in (b"NaN", b"1e999", b"-1", b'"Infinity"')),
    b'{"scope": "read", "name": "' + b"x" * 1000 + b'"}', b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe", b'{"name": "\xff"}',
    b'{"\\ud800": 1}', b'{"' + b"x" * 100_000 + b'": 1}',
)  # fmt: skip
STEPS = (0, -1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 2**64, 10**30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    with api(tmp_path_factory.mktemp("bad")) as running:
        send(running, frame({"loss": [1.0, 2.0]}))
        send(running, frame({"loss": [1.0]}, run="kept"))  # the other one is deleted on the way
        yield running


@pytest.fixture
def client(server: TestClient) -> TestClient:
    """Who has not been refused yet."""
    forgive(server)
    return server


def forgive(client: TestClient) -> None:
    access = services_of(client).access
    access.failures, access.guesses = Failures(), Failures()  # /login counts its refusals


@pytest.mark.fault
def test_x01_odd_bodies_and_media_types_are_answered_below_500(client: TestClient) -> None:
    for path in ("runs/r1", "keys", "log", "../../login", "session/links"):
        method = "PATCH" if path == "runs/r1" else "POST"
        for body in BODIES:
            forgive(client)
            fine(client.request(method, f"/api/v1/{path}", content=body, headers=JSON))
        for media in ("", "text/plain", "application/json; charset=utf-7", "multipart/form-data; boundary=x", "\xff"):
            headers = {**ADMIN, "Content-Type": media.encode("latin-1")}
            fine(client.request(method, f"/api/v1/{path}", content=b"x=1", headers=headers))


def fine(answer: Any) -> None:
    if answer.headers.get("content-type", "").startswith("text/html"):
        assert answer.status_code in (200, 303, 400, 401, 415, 422, 429), answer.request.url
        return
    assert answer.status_code < 500, f"{answer.request.method} {answer.request.url}: {answer.text[:500]}"
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert isinstance(error["code"], str)
        assert error["message"]


def refusal(answer: Any) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error.get("field"), error["message"]


@pytest.mark.fault
def test_x01_odd_queries_and_paths_are_answered_below_500(client: TestClient) -> None:
    for query in QUERIES:
        for text in TEXTS:
            forgive(client)
            fine(client.get(f"/api/v1/{query.replace('{}', text)}"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in STEPS:
            for path, which in (("series", "from"), ("series", "to"), ("ranks", "from"), ("ranks", "to")):
                fine(client.get(f"/api/v1/runs/r1/{path}", params={"name": "loss", which: step}))


@pytest.mark.fault
def test_x01_odd_authorization_headers_are_answered_with_401(client: TestClient) -> None:
    for value in ("", "Bearer", "Basic x", "Bearer pfa_", "Bearer pfa_read_a_b", "Bearer " + "x" * 5000, "Bearer \xff"):
        forgive(client)
        answer = client.get("/api/v1/runs", headers={"Authorization": value.encode("latin-1")})
        assert answer.status_code == 401, value
        fine(answer)


def test_unknown_paths_are_json_404_and_wrong_methods_405(client: TestClient) -> None:
    for path in ("", "/", "/v1", "/v1/nothing", "/v2/runs", "/v1/runs/r1/nothing"):
        answer = client.get(f"/api{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found"), path
    answer = client.get("/api/v1/ingest")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("method", "path", "body", "misspelt", "allowed"),
    [
        ("POST", "channels", {"url": "https://8.8.8.8/", "min_severty": "critical"}, "min_severty", CHANNEL),
        ("PATCH", "runs/kept", {"state": "failed"}, "state", "name, tags, notes, rules_off"),
        ("POST", "keys", {"scope": "read", "expires": 60}, "expires", "scope, name, project, expires_in_s, limits"),
        ("POST", "alerts/none/mute", {"for_ss": 60}, "for_ss", "for_s, note"),
    ],
)
def test_a_field_that_a_body_does_not_have_is_refused_by_name(
    client: TestClient, method: str, path: str, body: dict[str, Any], misspelt: str, allowed: str
) -> None:
    status, field, message = refusal(client.request(method, f"/api/v1/{path}", content=json.dumps(body), headers=JSON))
    assert (status, field, f"'{misspelt}'" in message, allowed in message) == (422, misspelt, True, True)
    assert client.get("/api/v1/runs/kept").json()["name"] == "kept"


@pytest.mark.parametrize("path", ["log", "channels", "runs/kept", "keys", "runs/kept/commands", "alerts/none/mute"])
def test_a_body_must_be_a_json_object_and_say_so(client: TestClient, path: str) -> None:
    def ask(body: bytes | None, media: str | None = "application/json") -> Any:
        headers = {**ADMIN, **({"Content-Type": media} if media else {})}
        method = "PATCH" if path == "runs/kept" else "POST"
        return client.request(method, f"/api/v1/{path}", content=body, headers=headers)

    for media in ("application/x-www-form-urlencoded", "text/plain", *(() if path == "log" else (None,))):
        answer = ask(b'{"run": "a"}', None if media is None else f"{media}; charset=utf-8")
        status, field, message = refusal(answer)
        assert (status, field, answer.json()["error"]["code"]) == (415, "content-type", "unsupported_media_type")
        assert f"is '{media}'" in message if media else "is missing" in message
        assert "application/json" in message
    if path != "log":
        for body in (b"[]", b"3", b'"text"', *((None,) if path == "runs/kept" else ())):
            status, field, message = refusal(ask(body))
            assert (status, "JSON object" in message) == (422, True), body
    status, _, message = refusal(ask(b"{"))
    assert (status, "not valid JSON" in message or path == "log") == (400, True)


def test_a_wrong_value_of_a_query_is_named(client: TestClient) -> None:
    answer = client.get("/api/v1/runs/kept/series", params={"name": "loss", "rank": "first"})
    status, field, message = refusal(answer)
    assert (status, field, "all and 0" in message) == (422, "rank", True)
    for path, wrong in (("runs?projct=x", "projct"), ("runs/kept/series?name=loss&form=5", "form")):
        assert refusal(client.get(f"/api/v1/{path}"))[:2] == (422, wrong)
    assert client.get("/api/v1/runs/kept/series?name=loss&from=1").status_code == 200
