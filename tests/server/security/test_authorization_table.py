"""Every route against every kind of caller. A route without an entry here fails, so that none is added without a
decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from starlette.routing import BaseRoute, WebSocketRoute

OPEN, READ, INGEST, OPERATE, ADMIN_ONLY = "open", "read", "ingest", "operate", "admin"
READ_AND_INGEST = "read and ingest"  # changes what it shows: a job's ingest key may neither see nor quiet other runs

TABLE: dict[tuple[str, str], str] = {
    ("POST", "/api/v1/ingest"): INGEST,
    ("POST", "/api/v1/log"): INGEST,
    ("GET", "/api/v1/runs"): READ,
    ("GET", "/api/v1/runs/{run}"): READ,
    ("PATCH", "/api/v1/runs/{run}"): READ_AND_INGEST,
    ("DELETE", "/api/v1/runs/{run}"): ADMIN_ONLY,
    ("GET", "/api/v1/runs/{run}/latest"): READ,
    ("GET", "/api/v1/runs/{run}/names"): READ,
    ("GET", "/api/v1/runs/{run}/events"): READ,
    ("GET", "/api/v1/runs/{run}/series"): READ,
    ("GET", "/api/v1/runs/{run}/timing"): READ,
    ("GET", "/api/v1/timing"): READ,
    ("GET", "/api/v1/runs/{run}/ranks"): READ,
    ("GET", "/api/v1/runs/{run}/export"): READ,
    ("GET", "/api/v1/runs/{run}/verdict"): READ,
    ("GET", "/api/v1/runs/{run}/findings"): READ,
    ("GET", "/api/v1/runs/{run}/alerts"): READ,
    ("POST", "/api/v1/runs/{run}/commands"): READ_AND_INGEST,
    ("GET", "/api/v1/runs/{run}/commands"): READ,
    ("GET", "/api/v1/runs/{run}/profiles"): READ,
    ("GET", "/api/v1/runs/{run}/profiles/{profile}"): READ,
    ("GET", "/api/v1/runs/{run}/profiles/{profile}/operators"): READ,
    ("GET", "/api/v1/runs/{run}/stacks"): READ,
    ("GET", "/api/v1/alerts"): READ,
    ("GET", "/api/v1/alerts/{alert_id}"): READ,
    ("POST", "/api/v1/alerts/{alert_id}/ack"): OPERATE,
    ("POST", "/api/v1/alerts/{alert_id}/unack"): OPERATE,
    ("POST", "/api/v1/alerts/{alert_id}/mute"): OPERATE,
    ("POST", "/api/v1/alerts/{alert_id}/unmute"): OPERATE,
    ("POST", "/api/v1/alerts/{alert_id}/snooze"): OPERATE,
    ("POST", "/api/v1/alerts/{alert_id}/unsnooze"): OPERATE,
    ("POST", "/api/v1/alerts/{alert_id}/resolve"): OPERATE,
    ("GET", "/api/v1/silences"): READ,
    ("POST", "/api/v1/silences"): OPERATE,
    ("DELETE", "/api/v1/silences/{silence_id}"): OPERATE,
    ("GET", "/api/v1/channels"): ADMIN_ONLY,
    ("POST", "/api/v1/channels"): ADMIN_ONLY,
    ("PATCH", "/api/v1/channels/{channel_id}"): ADMIN_ONLY,
    ("DELETE", "/api/v1/channels/{channel_id}"): ADMIN_ONLY,
    ("POST", "/api/v1/channels/{channel_id}/rotate"): ADMIN_ONLY,
    ("POST", "/api/v1/channels/{channel_id}/test"): ADMIN_ONLY,
    ("GET", "/api/v1/deliveries"): READ,
    ("GET", "/api/v1/rules"): READ,
    ("PUT", "/api/v1/rules/{rule}"): ADMIN_ONLY,
    ("DELETE", "/api/v1/rules/{rule}"): ADMIN_ONLY,
    ("GET", "/api/v1/prices"): READ,
    ("PUT", "/api/v1/prices"): ADMIN_ONLY,
    ("DELETE", "/api/v1/prices"): ADMIN_ONLY,
    ("GET", "/api/v1/keys"): ADMIN_ONLY,
    ("POST", "/api/v1/keys"): ADMIN_ONLY,
    ("DELETE", "/api/v1/keys/{key_id}"): ADMIN_ONLY,
    ("GET", "/api/v1/session"): OPEN,
    ("DELETE", "/api/v1/session"): OPEN,
    ("POST", "/api/v1/session/links"): ADMIN_ONLY,
    ("GET", "/api/v1/self"): READ,
    ("GET", "/healthz"): OPEN,
    ("GET", "/readyz"): OPEN,
    ("GET", "/metrics"): READ,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/docs"): OPEN,
    ("GET", "/docs/{name}"): OPEN,
    ("GET", "/login"): OPEN,
    ("POST", "/login"): OPEN,
    ("WEBSOCKET", "/ws/live"): READ,
}
UNKNOWN = ("/api", "/api/{rest:path}")  # answer 404 to everybody
PAGES = ("/",)  # behind the page gate; see test_login.py

BODIES: dict[tuple[str, str], Any] = {
    ("PATCH", "/api/v1/runs/{run}"): {},
    ("PATCH", "/api/v1/channels/{channel_id}"): {},
    ("POST", "/api/v1/log"): {"run": "x", "metrics": {}},
    ("POST", "/api/v1/runs/{run}/commands"): {"kind": "flush"},
    ("PUT", "/api/v1/rules/{rule}"): {},
    ("POST", "/api/v1/keys"): {"scope": "read"},
    ("POST", "/api/v1/channels"): {"kind": "webhook", "url": "https://example.com/"},
    ("POST", "/api/v1/silences"): {"run": "r1", "for_s": 60},
}


def flat(routes: list[BaseRoute], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(method, path) of every route, also inside included routers."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            yield from flat(inner.routes, prefix + route.include_context.prefix)  # type: ignore[attr-defined]
        elif isinstance(route, APIRoute):
            yield from ((method, prefix + route.path) for method in route.methods)
        elif isinstance(route, WebSocketRoute) or type(route).__name__ == "APIWebSocketRoute":
            yield "WEBSOCKET", prefix + route.path
        else:
            raise AssertionError(f"a kind of route that this test does not know: {route!r}")


@dataclass
class Callers:
    client: TestClient
    headers: dict[str, dict[str, str]]


@pytest.fixture(scope="module", params=["auto", "required"])
def callers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    with api(tmp_path_factory.mktemp(request.param), auth=request.param) as client:
        send(client, frame({"loss": [1.0]}), **ADMIN)

        def key(scope: str) -> tuple[str, dict[str, str]]:
            made = client.post("/api/v1/keys", json={"scope": scope}, headers=ADMIN).json()
            return made["id"], {"Authorization": f"Bearer {made['key']}"}

        headers = {"none": {}, "admin token": ADMIN} | {
            scope: key(scope)[1] for scope in ("ingest", "read", "operate", "admin")
        }
        identifier, headers["revoked"] = key("admin")
        assert client.delete(f"/api/v1/keys/{identifier}", headers=ADMIN).status_code == 204
        services = client.app.state.services  # type: ignore[attr-defined]
        headers["expired"] = {"Authorization": "Bearer " + services.access.keys.create("admin", expires=1.0)[1]}
        yield Callers(client, headers)


def allowed(caller: str, needed: str, auth: str) -> bool:
    if caller in ("revoked", "expired"):
        return False  # whatever was needed, a bad key is told that it is bad
    if needed == OPEN:
        return True
    may = {
        "none": {READ, INGEST, OPERATE} if auth == "auto" else set(),
        "ingest": {INGEST},
        "read": {READ},
        "operate": {READ, OPERATE},
        "admin": {READ, INGEST, OPERATE, ADMIN_ONLY},
        "admin token": {READ, INGEST, OPERATE, ADMIN_ONLY},
    }
    return {READ, INGEST} <= may[caller] if needed == READ_AND_INGEST else needed in may[caller]


def test_every_route_has_an_entry(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        app = client.app
        assert isinstance(app, FastAPI)
        found = {entry for entry in flat(app.router.routes) if entry[1] not in (*UNKNOWN, *PAGES)}
    assert found - TABLE.keys() == set(), "routes without an entry: decide who may use them"
    assert TABLE.keys() - found == set(), "entries without a route"


@pytest.mark.parametrize("caller", ["none", "ingest", "read", "operate", "admin", "admin token", "revoked", "expired"])
def test_the_table_holds(callers: Callers, caller: str, request: pytest.FixtureRequest) -> None:
    auth = callers.client.app.state.services.settings.auth  # type: ignore[attr-defined]
    wrong = []
    for (method, path), needed in TABLE.items():
        if method == "WEBSOCKET":
            continue
        callers.client.app.state.access.failures.__init__()  # type: ignore[attr-defined]
        place = path.replace("{run}", "r1" if method != "DELETE" else "no-such-run").replace("{name}", "docs.js")
        place = place.replace("{alert_id}", "none").replace("{channel_id}", "none").replace("{key_id}", "none")
        place = place.replace("{silence_id}", "none")
        query = {"name": "loss"} if path.endswith(("series", "ranks")) else {}
        answer = callers.client.request(
            method, place, json=BODIES.get((method, path)), params=query, headers=callers.headers[caller]
        )
        refused = answer.status_code in (401, 403)
        ignores_keys = needed == OPEN and (method, path) != ("GET", "/api/v1/session")
        expected = allowed(caller, needed, auth) or ignores_keys
        if path == "/login" and method == "POST":
            expected = False  # no token was sent
        if refused == expected or answer.status_code >= 500:
            wrong.append(f"{caller} {method} {path}: {answer.status_code} {answer.text[:120]}")
    assert wrong == []


@pytest.mark.parametrize("caller", ["none", "ingest", "read", "operate", "admin", "revoked", "expired"])
def test_the_live_socket_asks_too(callers: Callers, caller: str) -> None:
    from starlette.testclient import WebSocketDenialResponse

    auth = callers.client.app.state.services.settings.auth  # type: ignore[attr-defined]
    callers.client.app.state.access.failures.__init__()  # type: ignore[attr-defined]
    if allowed(caller, READ, auth):
        with callers.client.websocket_connect("ws://127.0.0.1:8420/ws/live", headers=callers.headers[caller]) as socket:
            socket.send_json({"subscribe": {"runs": [], "names": []}})
            assert socket.receive_json() == {"subscribed": True}
    else:
        url, headers = "ws://127.0.0.1:8420/ws/live", callers.headers[caller]
        with pytest.raises(WebSocketDenialResponse) as denied, callers.client.websocket_connect(url, headers=headers):
            pass
        assert denied.value.status_code in (401, 403)


def test_a_key_of_one_project_cannot_touch_another(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        send(client, frame({"loss": [1.0]}, project="theirs"))
        made = client.post("/api/v1/keys", json={"scope": "ingest", "project": "ours"}, headers=ADMIN).json()
        headers = {"Authorization": f"Bearer {made['key']}"}
        for method, path, body in (
            ("PATCH", "/api/v1/runs/r1", {"name": "taken"}),
            ("POST", "/api/v1/alerts/none/resolve", None),
            ("POST", "/api/v1/log", {"project": "theirs", "run": "x", "metrics": {"loss": 1}}),
            ("DELETE", "/api/v1/runs/r1", None),
        ):
            answer = client.request(method, path, json=body, headers=headers)
            assert answer.status_code == 403, f"{method} {path}: {answer.text}"
        own = {"project": "ours", "run": "x", "metrics": {"loss": 1}}
        assert client.post("/api/v1/log", json=own, headers=headers).is_success
