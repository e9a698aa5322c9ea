"""Every route against every kind of caller. A route without an entry in tests/authorization_table.py fails, so that none is
added without a decision."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, MSGPACK, api, frame, send, services_of
from authorization_table import CALLERS, OURS, PAGES, TABLE, THEIRS, UNKNOWN, Caller, Need, declared, expected, flat
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import insert
from starlette.requests import Request
from starlette.testclient import WebSocketDenialResponse

from perfagent.wire import Event, encode
from perfagent_server.security.failures import Failures
from perfagent_server.store.tables import alert
from perfagent_server.store.tables import run as runs

ROOT = Path(__file__).resolve().parents[3]
RUN, ALERT = "r1", "al_of_r1"
IMPORT, IMPORTED_RUN = "im_0123456789ab", "r3"
CANARY = "canary"
"""Part of every text that belongs to the project `ours`: who may not see it never reads this word."""

LOW = {"metric": "loss", "comparison": "<", "threshold": 0, "for_steps": 1}
BODIES: dict[tuple[str, str], Any] = {
    ("PATCH", "/api/v1/runs/{run}"): {},
    ("PATCH", "/api/v1/channels/{channel_id}"): {},
    ("PATCH", "/api/v1/users/{name}"): {},
    ("POST", "/api/v1/users"): {"name": "a/b"},
    ("POST", "/api/v1/session/password"): {"old": "x", "password": "x"},
    ("POST", "/api/v1/log"): {"project": OURS, "run": "x", "metrics": {}},
    ("POST", "/api/v1/runs/{run}/commands"): {"kind": "flush"},
    ("PUT", "/api/v1/rules/{rule}"): {},
    ("POST", "/api/v1/alerts/ack"): {"alerts": [ALERT]},
    ("POST", "/api/v1/alerts/unack"): {"alerts": [ALERT]},
    ("POST", "/api/v1/rules/alerts"): {"name": "a", **LOW},
    ("PUT", "/api/v1/rules/alerts/{name}"): LOW,
    ("POST", "/api/v1/rules/alerts/try"): {"run": RUN, **LOW},
    ("PUT", "/api/v1/views/{name}"): {"page": "runs", "query": f"q={CANARY}", "replace": True},
    ("PUT", "/api/v1/imports/{import_id}"): {"project": OURS, "origin": CANARY},
    ("POST", "/api/v1/imports/known"): {"runs": [RUN, IMPORTED_RUN]},
    ("PUT", "/api/v1/prices"): {"currency": CANARY, "kwh": 0.3},
    ("PUT", "/api/v1/retention"): {"samples_days": 30},
    ("PATCH", "/api/v1/retention"): {"samples_days": 30},
    ("POST", "/api/v1/keys"): {"scope": "read", "project": OURS},
    ("PATCH", "/api/v1/keys/{key_id}"): {"limits": {"requests_per_s": 50}},
    ("POST", "/api/v1/channels"): {"kind": "webhook", "url": "https://example.com/"},
    ("POST", "/api/v1/runs/{run}/annotations"): {"step": 1, "text": CANARY},
    ("PUT", "/api/v1/panels/{panel}"): {"title": CANARY, "lines": ["loss"]},
    ("POST", "/api/v1/silences"): {"project": OURS, "run": RUN, "for_s": 60},
}
QUERIES: dict[str, dict[str, str]] = {
    "/api/v1/runs/{run}/series": {"name": "loss"},
    "/api/v1/runs/{run}/ranks": {"name": "loss"},
    "/api/v1/runs/{run}/layers": {"family": "grad_norm"},
    "/api/v1/runs/{run}/media/histograms": {"name": f"{CANARY}-media"},
    "/api/v1/timing": {"run": RUN},
    "/api/v1/series": {"run": RUN, "name": "loss"},
    "/api/v1/rules": {"project": OURS},
    "/api/v1/rules/{rule}": {"project": OURS},
    **{f"/api/v1/rules/alerts{rest}": {"project": OURS} for rest in ("", "/{name}", "/try")},
    **{f"/api/v1/panels{rest}": {"project": OURS} for rest in ("", "/{panel}")},
    "/api/v1/groups": {"by": "tag"},
    "/api/v1/groups/series": {"by": "tag", "name": "loss"},
    "/api/v1/groups/runs": {"by": "tag"},
    **{f"/api/v1/views{rest}": {"project": OURS} for rest in ("", "/{name}")},
    "/api/v1/prices": {"project": OURS},
    "/api/v1/retention": {"project": OURS},
}


@dataclass
class Callers:
    client: TestClient
    headers: dict[str, dict[str, str]]
    silence: str
    key: str


@pytest.fixture(scope="module", params=["auto", "required"])
def callers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callers]:
    with api(tmp_path_factory.mktemp(request.param), auth=request.param) as client:
        picture = {"name": f"{CANARY}-media", "what": "image", "payload": b"\x89PNG\r\n\x1a\n" + CANARY.encode()}
        media = [Event(kind="media", time=1.0, data=picture)]
        send(client, frame({"loss": [1.0]}, run=RUN, project=OURS, name=f"{CANARY}-name", events=media), **ADMIN)
        send(client, frame({"loss": [1.0]}, run="r2", project=THEIRS, name="another"), **ADMIN)
        brought = [Event(kind="import", time=1.0, data={"import": IMPORT, "taken": {"0123456789abcdef": 1}})]
        old = frame({"loss": [1.0]}, run=IMPORTED_RUN, project=OURS, source="import-r3", events=brought)
        send(client, old, **ADMIN)
        client.put(f"/api/v1/imports/{IMPORT}", json={"project": OURS, "origin": CANARY}, headers=ADMIN)
        _write_canaries(client)
        headers = {caller.name: _headers(client, caller) for caller in CALLERS}
        bodies = {"silences": {"note": CANARY, "for_s": 600}, "keys": {"scope": "read", "name": CANARY}}
        made = [
            client.post(f"/api/v1/{of}", json={"project": OURS, **body}, headers=ADMIN) for of, body in bodies.items()
        ]
        yield Callers(client, headers, *(answer.json()["id"] for answer in made))


def _write_canaries(client: TestClient) -> None:
    changed = {"tags": [f"{CANARY}-tag"], "notes": CANARY}
    assert client.patch(f"/api/v1/runs/{RUN}", json=changed, headers=ADMIN).status_code == 200
    note = {"step": 1, "text": CANARY}
    assert client.post(f"/api/v1/runs/{RUN}/annotations", json=note, headers=ADMIN).status_code == 201
    price = {"currency": CANARY, "kwh": 0.3}
    assert client.put("/api/v1/prices", params={"project": OURS}, json=price, headers=ADMIN).status_code == 200
    row = {
        "id": ALERT, "run": RUN, "rule": "data_bound", "severity": "warning", "state": "firing", "message": CANARY,
        "fix": "", "title": CANARY, "since": time.time(),
    }  # fmt: skip

    def job(connection: Any) -> None:
        connection.execute(insert(alert).values(**row))
        connection.execute(runs.update().values(host=f"{CANARY}-host").where(runs.c.id == RUN))

    services_of(client).database.write(job)


def _headers(client: TestClient, caller: Caller) -> dict[str, str]:
    """What a caller of this kind sends: a key, or the cookie of a session. Passwords are tested in test_users.py."""
    services = services_of(client)
    if caller.name == "nobody":
        return {}
    project = next(iter(caller.rights.by_project), None)
    scope = caller.name.partition(" ")[0]
    if caller.kind in ("key", "bad key"):
        scope = scope if caller.kind == "key" else "admin"
        expires = 1.0 if caller.name == "expired key" else None
        key, token = services.access.keys.create(scope, project=project, expires=expires)
        if caller.name == "revoked key":
            assert services.access.keys.revoke(key.id)
        return {"Authorization": f"Bearer {token}"}
    accounts = services.people.accounts
    roles = [(None, "admin")] if scope in ("disabled", "removed") else [(project, scope)]
    ident = accounts.add(caller.name, None, [] if scope == "user" else roles)
    asked = Request({"type": "http", "headers": [], "client": ("127.0.0.1", 1)})
    session = services.access.sessions.open(asked, user=accounts.by_id(ident))
    if scope == "disabled":
        assert accounts.change(ident, disabled=True)
    if scope == "removed":
        assert accounts.remove(ident)
    return {"Cookie": f"perfagent_session={session}"}


@pytest.mark.fault
def test_x09_every_route_has_an_entry(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        app = client.app
        assert isinstance(app, FastAPI)
        found = {(method, path): route for method, path, route in flat(app.router.routes)}
        found = {entry: route for entry, route in found.items() if entry[1] not in (*UNKNOWN, *PAGES)}
    assert found.keys() - TABLE.keys() == set(), "routes without an entry: decide who may use them"
    assert TABLE.keys() - found.keys() == set(), "entries without a route"
    # The websocket asks in its own code, which test_the_live_socket_asks_too sees.
    wrong = {
        entry: declared(route)
        for entry, route in found.items()
        if entry[0] != "WEBSOCKET" and not _asks_for(declared(route), TABLE[entry])
    }
    assert wrong == {}, "routes that ask for something else than their entry says"


def _asks_for(scopes: set[str], need: Need) -> bool:
    if need.scope is None:
        return scopes == set()
    wanted = f"{need.scope} everywhere" if need.on == "server" else need.scope
    return scopes - {"read"} == {wanted} - {"read"} and (wanted != "read" or scopes == {"read"})


def ask_anew(client: TestClient) -> bool:
    """No refusal before counts. Answers whether nobody in particular may do something here."""
    services_of(client).access.failures = Failures()
    services_of(client).access.guesses = Failures()
    return services_of(client).settings.open_access


@pytest.mark.fault
@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.name)
def test_x09_the_table_holds(callers: Callers, caller: Caller) -> None:
    client, wrong = callers.client, []
    for (method, path), need in TABLE.items():
        if method == "WEBSOCKET":
            continue
        open_access = ask_anew(client)
        outcome = expected(need, caller, open_access=open_access)
        place = path.format(
            run="no-such-run" if method == "DELETE" and outcome == "yes" else RUN, alert_id=ALERT, rule="data_bound",
            name="docs.js" if path.startswith("/docs") else "nobody-of-this-name", channel_id="none",
            silence_id="none" if outcome == "yes" else callers.silence, session_id="none", profile="none",
            annotation="none", panel="p1", media="1", import_id="im_ffffffffffff" if outcome == "yes" else IMPORT,
            key_id="none" if outcome == "yes" else callers.key,
        )  # fmt: skip
        query: Any = QUERIES.get(path, {})
        if method == "GET" and path in ("/api/v1/prices", "/api/v1/retention"):
            query = {}
        if (method, path, outcome) == ("DELETE", "/api/v1/prices", "yes"):
            query = {"project": "" if "admin" in caller.rights.everywhere else OURS}
        if path == "/api/v1/compare":
            query = [("runs", RUN), ("runs", f"{CANARY}-name")]
        content = {"json": BODIES[method, path]} if (method, path) in BODIES else {}
        if path == "/api/v1/ingest":
            sent = frame({"loss": [2.0]}, run=RUN, project=OURS, seq=2)
            content = {"content": encode(sent), "headers": MSGPACK}
        own = callers.headers[caller.name]
        if (method, path) == ("DELETE", "/api/v1/session") and caller.kind == "user":
            own = {}  # it would end the session that the other routes are asked with; see test_users.py
        headers = {**content.pop("headers", {}), **own}
        answer = client.request(method, place, params=query, headers=headers, **content)
        client.cookies.clear()
        told = f"{method} {path}: {answer.status_code}, wanted {outcome}: {answer.text[:120]}"
        is_asked = need.scope is not None or need.on == "user" or (method, path) == ("GET", "/api/v1/session")
        if (method, path) == ("POST", "/login") or (caller.kind == "bad key" and is_asked):
            outcome = "no"  # to log in nothing was sent
        elif path.startswith("/login/oidc"):
            outcome = "hidden"  # no provider is set up here
        is_right = {"no": (401, 403), "hidden": (404,)}.get(outcome, {answer.status_code} - {401, 403})
        if answer.status_code not in is_right or answer.status_code >= 500:
            wrong.append(told)
        # What is told of the run's name is in the question itself.
        if path != "/api/v1/compare" and CANARY in answer.text and not _sees(caller, open_access=open_access):
            wrong.append(f"a leak: {told}")
    assert wrong == []


def _sees(caller: Caller, *, open_access: bool) -> bool:
    return caller.rights.may("read", OURS) or (open_access and caller.kind == "nobody")


@pytest.mark.fault
@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.name)
def test_x09_what_one_may_read_is_there_and_the_socket_asks(callers: Callers, caller: Caller) -> None:
    """The other half of the leak check: the canary is in the answers of those who may see it."""
    client, headers = callers.client, callers.headers[caller.name]
    open_access = ask_anew(client)
    if _sees(caller, open_access=open_access):
        client.put("/api/v1/prices", params={"project": OURS}, json={"currency": CANARY, "kwh": 0.3}, headers=ADMIN)
        written = client.put(
            "/api/v1/panels/p1", params={"project": OURS}, json={"title": CANARY, "lines": ["loss"]}, headers=ADMIN
        )
        assert written.status_code == 200
        for path in (
            "/panels?project=ours",
            f"/runs/{RUN}/annotations",
            "/runs",
            f"/runs/{RUN}",
            "/alerts",
            f"/alerts/{ALERT}",
            "/silences",
            "/prices",
        ):
            assert CANARY in client.get(f"/api/v1{path}", headers=headers).text, path
    url = "ws://127.0.0.1:8420/ws/live"
    may = expected(TABLE["WEBSOCKET", "/ws/live"], caller, open_access=open_access)
    if may == "yes" and caller.kind != "bad key":
        with client.websocket_connect(url, headers=headers) as socket:
            socket.send_json({"subscribe": {"runs": [], "names": []}})
            assert socket.receive_json()["subscribed"] is True
    else:
        with pytest.raises(WebSocketDenialResponse) as denied, client.websocket_connect(url, headers=headers):
            pass
        assert denied.value.status_code in (401, 403)


@pytest.mark.real
def test_the_page_of_the_table_is_current(tmp_path: Path) -> None:
    written = tmp_path / "authorization.md"
    subprocess.run([sys.executable, ROOT / "scripts" / "authorization", "--out", written], check=True)
    assert written.read_text() == (ROOT / "docs" / "reference" / "authorization.md").read_text(), (
        "run scripts/authorization"
    )
