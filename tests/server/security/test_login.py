"""How a browser comes in, and how long keys, sessions and one-time addresses live."""

from __future__ import annotations

import asyncio
import re
import secrets
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, ADMIN_TOKEN, api, settings_for
from builders import until
from fastapi.testclient import TestClient

from perfagent.admin_proof import AdminProof
from perfagent.errors import ConfigError
from perfagent.local_server import announcement
from perfagent_server.security.failures import Failures
from perfagent_server.security.keys import secret_file

PAGE = {"Accept": "text/html"}


def one_time_path(client: TestClient) -> str:
    url = client.post("/api/v1/session/links", headers=ADMIN).json()["url"]
    return str(url).removeprefix("http://127.0.0.1:8420")


def test_a_one_time_address_makes_an_administrator_once(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        path = one_time_path(client)
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower() and "Secure" not in cookie
        assert client.get("/api/v1/session").json()["may"] == ["admin", "ingest", "operate", "read"]
        assert client.get("/api/v1/keys").status_code == 200
        client.cookies.clear()
        assert client.get(path).status_code == 401, "it works once"
        assert client.get("/api/v1/keys").status_code == 401


def test_a_preview_of_a_one_time_address_does_not_use_it_up(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        path = one_time_path(client)
        assert client.head(path).status_code == 200
        assert client.get(path).status_code == 303


def test_a_session_over_https_has_the_host_cookie(tmp_path: Path) -> None:
    with api(tmp_path, base_url="https://127.0.0.1:8420") as client:
        cookie = client.get(one_time_path(client)).headers["set-cookie"]
        assert cookie.startswith("__Host-perfagent=") and "Secure" in cookie and "Path=/" in cookie
        assert client.get("/api/v1/keys").status_code == 200


def test_behind_a_proxy_that_is_not_trusted_the_public_address_makes_cookies_secure(tmp_path: Path) -> None:
    with api(tmp_path, public_url="https://monitor.example.org") as client:
        user = {"name": "ada", "password": "correct horse battery", "roles": [{"role": "viewer"}]}
        assert client.post("/api/v1/users", json=user, headers=ADMIN).status_code == 201
        answer = client.post("/login", data={"name": "ada", "password": user["password"]})
        cookies = answer.headers.get_list("set-cookie")
        assert [cookie.split("=")[0] for cookie in cookies] == ["__Host-perfagent", "perfagent_device"]
        assert all("Secure" in cookie for cookie in cookies)


def test_a_session_survives_a_restart_and_ends_with_the_logout(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        client.get(one_time_path(client))
        cookies = dict(client.cookies)
    with api(tmp_path) as client:
        client.cookies.update(cookies)
        assert client.get("/api/v1/keys").status_code == 200
        assert client.delete("/api/v1/session").status_code == 204
        client.cookies.update(cookies)
        assert client.get("/api/v1/keys").status_code == 401


def test_an_unknown_cookie_is_no_credential(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        client.cookies.set("perfagent_session", "of another server on this machine")
        assert client.get("/api/v1/runs").status_code == 200
        assert client.get("/api/v1/keys").status_code == 401


def test_pages_are_behind_the_login_where_keys_are_required(tmp_path: Path) -> None:
    with api(tmp_path, auth="required", dashboard=True) as client:
        answer = client.get("/", headers=PAGE)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert client.get("/run/r1", headers=PAGE).status_code == 303
        for path in ("/_dash-layout", "/_dash-dependencies", "/assets/style.css"):
            assert client.get(path).status_code == 401, path
        assert client.post("/_dash-update-component", json={}).status_code == 401
        assert "password" in client.get("/login", headers=PAGE).text
        login = client.post("/login", data={"token": ADMIN_TOKEN})
        assert (login.status_code, login.headers["location"]) == (303, "/")
        assert client.get("/", headers=PAGE).status_code == 200
        assert client.get("/api/v1/keys").status_code == 200


def test_a_read_key_logs_in_to_read(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        keys = {
            scope: client.post("/api/v1/keys", json={"scope": scope}, headers=ADMIN).json()["key"]
            for scope in ("read", "ingest")
        }
        assert client.post("/login", data={"token": keys["ingest"]}).status_code == 403
        assert client.post("/login", data={"token": keys["read"]}).status_code == 303
        assert client.get("/api/v1/session").json()["may"] == ["read"]
        assert client.get("/api/v1/runs").status_code == 200
        assert client.get("/api/v1/keys").status_code == 403
        assert client.post("/api/v1/log", json={"run": "x", "metrics": {}}).status_code == 403


def test_a_session_ends_with_the_key_that_opened_it_and_no_other_does(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        cookies, ids = {}, {}
        for name in ("gone", "kept"):
            made = client.post("/api/v1/keys", json={"scope": "admin"}, headers=ADMIN).json()
            client.post("/login", data={"token": made["key"]})
            cookies[name] = dict(client.cookies)
            client.cookies.clear()
            ids[name] = made["id"]
        client.post("/login", data={"token": ADMIN_TOKEN})
        cookies["token"] = dict(client.cookies)
        client.cookies.clear()
        assert client.delete(f"/api/v1/keys/{ids['gone']}", headers=ADMIN).status_code == 204
        statuses = {}
        for name, held in cookies.items():
            client.cookies.update(held)
            statuses[name] = client.get("/api/v1/keys").status_code
            client.cookies.clear()
        assert statuses == {"gone": 401, "kept": 200, "token": 200}


def test_a_session_lives_no_longer_than_the_key_that_opened_it(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        made = client.post("/api/v1/keys", json={"scope": "read", "expires_in_s": 3600}, headers=ADMIN).json()
        client.post("/login", data={"token": made["key"]})
        sessions = client.app.state.services.access.sessions  # type: ignore[attr-defined]
        assert sessions.find(client.cookies).may == {"read"}
        now = sessions._clock()
        sessions._clock = lambda: now + 3601
        assert sessions.find(client.cookies) is None


@pytest.mark.fault
def test_x08_ten_wrong_keys_a_minute_are_enough(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        statuses = [
            client.get("/api/v1/runs", headers={"Authorization": f"Bearer wrong-{n}"}).status_code for n in range(13)
        ]
        assert statuses == [401] * 10 + [429] * 3
        answer = client.get("/api/v1/runs", headers={"Authorization": "Bearer wrong"})
        assert 0 < int(answer.headers["Retry-After"]) <= 60
        assert client.post("/login", data={"token": "wrong"}).status_code == 429


@pytest.mark.fault
def test_x08_after_too_many_guesses_a_short_admin_token_is_refused_too_until_the_minute_is_over(
    tmp_path: Path,
) -> None:
    """Else the limit limits nothing: who guesses what a person made up learns from the one answer that differs."""
    with api(tmp_path) as client:
        key = client.post("/api/v1/keys", json={"scope": "admin"}, headers=ADMIN).json()["key"]
        now = [time.monotonic()]
        guesses = client.app.state.services.access.guesses  # type: ignore[attr-defined]
        guesses._clock = lambda: now[0]
        for number in range(15):
            client.get("/api/v1/runs", headers={"Authorization": f"Bearer guess-{number}"})
        assert client.get("/api/v1/runs", headers=ADMIN).status_code == 429
        assert client.post("/login", data={"token": ADMIN_TOKEN}).status_code == 429
        assert client.get("/api/v1/runs", headers={"Authorization": f"Bearer {key}"}).status_code == 200, (
            "nobody guesses 256 bits"
        )
        now[0] += 61
        assert client.get("/api/v1/runs", headers=ADMIN).status_code == 200
        assert client.post("/login", data={"token": ADMIN_TOKEN}).status_code == 303


@pytest.mark.fault
@pytest.mark.parametrize("wrong", ["guess", "proof"])
def test_x08_wrong_proofs_of_a_neighbor_lock_no_administrator_out(tmp_path: Path, wrong: str) -> None:
    """Nobody guesses a token of 256 bits, so the right one is let in whatever else came from its address."""
    token = secrets.token_urlsafe(32)
    with api(tmp_path, admin_token=token) as client:
        announced = announcement(settings_for(tmp_path).local_url)

        def asked(header: str) -> int:
            return client.get("/api/v1/keys", headers={"Authorization": header}).status_code

        def proof(of: str) -> str:
            return AdminProof(of, lambda: announced).header("GET", "/api/v1/keys")

        statuses = [asked(proof("another token") if wrong == "proof" else f"Bearer guess-{n}") for n in range(15)]
        assert statuses == [401] * 10 + [429] * 5
        right = proof(token)
        assert [asked(right), asked(proof(token)), asked(f"Bearer {token}")] == [200] * 3
        assert client.post("/login", data={"token": token}).status_code == 303
        assert asked(right) == 429, "a proof serves once"
        assert asked(proof("another token")) == 429


def test_an_administrator_is_not_shut_out_by_his_own_requests_nor_by_jobs_with_a_revoked_key(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        revoked = f"pfa_ingest_{'a' * 8}_{'b' * 43}"
        for _ in range(15):
            assert client.get("/api/v1/keys", headers=ADMIN).status_code == 200
            assert client.get("/api/v1/runs", headers={"X-API-Key": revoked}).status_code in (401, 429)
        assert client.get("/api/v1/keys", headers=ADMIN).status_code == 200


def test_who_asks_is_looked_up_off_the_event_loop(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        services = client.app.state.services  # type: ignore[attr-defined]
        key = client.post("/api/v1/keys", json={"scope": "admin"}, headers=ADMIN).json()["key"]
        reads: list[bool] = []
        read = services.database.read

        def watched() -> Any:
            try:
                asyncio.get_running_loop()
                reads.append(True)
            except RuntimeError:
                reads.append(False)
            return read()

        services.access.keys._database.read = watched
        for path in ("/api/v1/session", "/api/v1/runs", "/"):
            services.access.keys._loaded = -1e9
            assert client.get(path, headers={"Authorization": f"Bearer {key}"}).status_code in (200, 404)
        assert client.post("/login", data={"token": key}).status_code == 303
        for path in ("/api/v1/session", "/api/v1/runs", "/"):
            assert client.get(path).status_code in (200, 404)
        client.cookies.clear()
        assert client.post("/login", data={"name": "nobody", "password": "a wrong one"}).status_code == 401
        assert len(reads) >= 9
        assert not any(reads)


@pytest.mark.fault
def test_x08_failures_are_counted_by_address_and_minute() -> None:
    now = [0.0]
    failures = Failures(2, clock=lambda: now[0], addresses=3)
    assert [failures.count("a") for _ in range(3)] == [0.0, 0.0, 60.0]
    assert failures.count("b") == 0.0
    now[0] = 59.0
    assert failures.count("a") == 1.0
    now[0] = 60.0
    assert failures.count("a") == 0.0
    for number in range(100):
        failures.count(str(number))
    assert len(failures._windows) == 3


def test_a_key_is_shown_once_and_kept_as_a_digest(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        made = client.post("/api/v1/keys", json={"scope": "ingest", "name": "cluster"}, headers=ADMIN)
        assert made.status_code == 201
        key = made.json()["key"]
        assert re.fullmatch(r"pfa_ingest_[0-9A-Za-z]{8}_[0-9A-Za-z]{43}", key)
        assert key.split("_")[2] == made.json()["id"]
        listed = client.get("/api/v1/keys", headers=ADMIN)
        assert key.split("_")[3] not in listed.text
        assert listed.json()["keys"][0]["name"] == "cluster"
    for file in (tmp_path / "server-data").iterdir():
        assert key.split("_")[3].encode() not in file.read_bytes(), file


def test_a_key_with_another_scope_in_its_name_is_refused(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        key = client.post("/api/v1/keys", json={"scope": "read"}, headers=ADMIN).json()["key"]
        assert (
            client.get("/api/v1/keys", headers={"X-API-Key": key.replace("pfa_read", "pfa_admin")}).status_code == 401
        )
        assert client.get("/api/v1/runs", headers={"X-API-Key": key}).status_code == 200
        # Written behind the answer, so that a request never waits for it.
        until(lambda: client.get("/api/v1/keys", headers=ADMIN).json()["keys"][0]["used"] is not None)


def test_a_key_lives_through_a_restart_and_a_revoked_one_does_not(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        kept = client.post("/api/v1/keys", json={"scope": "admin"}, headers=ADMIN).json()
        gone = client.post("/api/v1/keys", json={"scope": "admin"}, headers=ADMIN).json()
        assert client.delete(f"/api/v1/keys/{gone['id']}", headers=ADMIN).status_code == 204
        assert client.delete("/api/v1/keys/nothing", headers=ADMIN).status_code == 404
    with api(tmp_path) as client:
        assert client.get("/api/v1/keys", headers={"Authorization": f"Bearer {kept['key']}"}).status_code == 200
        assert client.get("/api/v1/keys", headers={"Authorization": f"Bearer {gone['key']}"}).status_code == 401


def test_keys_and_logins_are_in_the_audit_log(tmp_path: Path) -> None:
    from sqlalchemy import text

    with api(tmp_path) as client:
        made = client.post("/api/v1/keys", json={"scope": "read", "name": "x"}, headers=ADMIN).json()
        client.delete(f"/api/v1/keys/{made['id']}", headers=ADMIN)
        client.get(one_time_path(client))
        with client.app.state.services.database.read() as connection:  # type: ignore[attr-defined]
            rows = connection.execute(text("SELECT who, action FROM audit ORDER BY id")).all()
        assert [tuple(row) for row in rows] == [
            ("admin token", "key.create"),
            ("admin token", "key.revoke"),
            ("admin token", "session.link"),
            ("admin token", "session.open"),
        ]


def test_secrets_are_their_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    first = secret_file(path)
    assert secret_file(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        secret_file(path)
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(ConfigError, match="delete it"):
        secret_file(path)


@pytest.mark.parametrize(
    ("asked", "leads_to"),
    [
        ("/run/r1?x=1-5", "/run/r1?x=1-5"), ("//evil.example/", "/"), ("https://evil.example/", "/"), ("/\\evil.example", "/"),
        ("/\t/evil.example", "/"), ("", "/"),
    ],
)  # fmt: skip
def test_a_login_leads_back_to_the_page_that_asked_for_it_and_nowhere_else(
    tmp_path: Path, asked: str, leads_to: str
) -> None:
    with api(tmp_path, auth="required") as client:
        made = client.post("/api/v1/keys", json={"scope": "operate"}, headers=ADMIN).json()
        answer = client.post("/login", data={"token": made["key"], "next": asked})
        assert (answer.status_code, answer.headers["location"]) == (303, leads_to)
        assert f'name="next" value="{leads_to}"' in client.get("/login", params={"next": asked}).text
