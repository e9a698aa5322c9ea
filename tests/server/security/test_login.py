"""How a browser comes in, and how long keys, sessions and one-time addresses live."""

from __future__ import annotations

import re
import secrets
import stat
import time
from pathlib import Path

import pytest
from api_builders import ADMIN, ADMIN_TOKEN, api, settings_for
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient

from perfagent.endpoint.admin_proof import AdminProof
from perfagent.endpoint.local_server import announcement
from perfagent.errors import ConfigError
from perfagent_server.security.keys import secret_file

PAGE = {"Accept": "text/html"}


def one_time_path(client: TestClient) -> str:
    url = client.post("/api/v1/session/links", headers=ADMIN).json()["url"]
    return str(url).removeprefix("http://127.0.0.1:8420")


def new_key(client: TestClient, scope: str, **more: object) -> dict[str, str]:
    """Its `id`, and the `key`."""
    made = client.post("/api/v1/keys", json={"scope": scope, **more}, headers=ADMIN)
    assert made.status_code == 201, made.text
    found: dict[str, str] = made.json()
    return found


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_one_time_address_makes_an_administrator_once(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        path = one_time_path(client)
        assert client.head(path).status_code == 200, "a preview does not use it up"
        answer = client.get(path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=lax" in cookie.lower() and "Secure" not in cookie
        assert client.get("/api/v1/session").json()["may"] == ["admin", "ingest", "operate", "read"]
        session = dict(client.cookies)
        client.cookies.clear()
        assert client.get(path).status_code == 401, "it works once"
        assert client.get("/api/v1/keys").status_code == 401
    with api(tmp_path) as client:
        client.cookies.update(session)
        assert client.get("/api/v1/keys").status_code == 200, "a session survives a restart"
        assert client.delete("/api/v1/session").status_code == 204
        client.cookies.update(session)
        assert client.get("/api/v1/keys").status_code == 401
        client.cookies.clear()
        client.cookies.set("perfagent_session", "of another server on this machine")
        assert client.get("/api/v1/runs").status_code == 200, "an unknown cookie is no credential"


def test_cookies_are_secure_over_https_and_a_public_address(tmp_path: Path) -> None:
    with api(tmp_path, base_url="https://127.0.0.1:8420") as client:
        cookie = client.get(one_time_path(client)).headers["set-cookie"]
        assert cookie.startswith("__Host-perfagent=") and "Secure" in cookie and "Path=/" in cookie
        assert client.get("/api/v1/keys").status_code == 200
    with api(tmp_path, public_url="https://monitor.example.org") as client:
        user = {"name": "ada", "password": "correct horse battery", "roles": [{"role": "viewer"}]}
        assert client.post("/api/v1/users", json=user, headers=ADMIN).status_code == 201
        answer = client.post("/login", data={"name": "ada", "password": user["password"]})
        cookies = answer.headers.get_list("set-cookie")
        assert [cookie.split("=")[0] for cookie in cookies] == ["__Host-perfagent", "perfagent_device"]
        assert all("Secure" in cookie for cookie in cookies)


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


def test_a_session_ends_with_the_key_that_opened_it(tmp_path: Path) -> None:
    clock = Clock(time.time())
    with api(tmp_path, auth="required", clocks={"clock": clock}) as client:
        gone, kept = new_key(client, "admin"), new_key(client, "admin")
        short = new_key(client, "admin", expires_in_s=3600)
        cookies = {}
        for name, token in {
            "gone": gone["key"],
            "kept": kept["key"],
            "short": short["key"],
            "token": ADMIN_TOKEN,
        }.items():
            client.post("/login", data={"token": token})
            cookies[name] = dict(client.cookies)
            client.cookies.clear()

        def statuses() -> dict[str, int]:
            found = {}
            for name, held in cookies.items():
                client.cookies.update(held)
                found[name] = client.get("/api/v1/keys").status_code
                client.cookies.clear()
            return found

        assert statuses() == dict.fromkeys(cookies, 200)
        assert client.delete(f"/api/v1/keys/{gone['id']}", headers=ADMIN).status_code == 204
        clock.at += 3601
        assert statuses() == {"gone": 401, "kept": 200, "short": 401, "token": 200}


@pytest.mark.fault
def test_x08_ten_wrong_keys_a_minute_are_enough(tmp_path: Path) -> None:
    """A short admin token is refused then, too: else who guesses what a person made up learns from the one answer that
    differs."""
    clock = Clock(time.monotonic())
    with api(tmp_path, clocks={"monotonic": clock}) as client:
        key = new_key(client, "admin")["key"]
        revoked = {"X-API-Key": f"pfa_ingest_{'a' * 8}_{'b' * 43}"}
        for _ in range(15):  # jobs with a revoked key
            assert client.get("/api/v1/runs", headers=revoked).status_code in (401, 429)
        assert client.get("/api/v1/keys", headers=ADMIN).status_code == 200, "and shut no administrator out"
        clock.at += 61
        statuses = [client.get("/api/v1/runs", headers=bearer(f"wrong-{n}")).status_code for n in range(13)]
        assert statuses == [401] * 10 + [429] * 3
        answer = client.get("/api/v1/runs", headers=bearer("wrong"))
        assert 0 < int(answer.headers["Retry-After"]) <= 60
        assert client.get("/api/v1/runs", headers=ADMIN).status_code == 429
        for token in ("wrong", ADMIN_TOKEN):
            assert client.post("/login", data={"token": token}).status_code == 429
        assert client.get("/api/v1/runs", headers=bearer(key)).status_code == 200, "nobody guesses 256 bits"
        clock.at += 61
        assert client.get("/api/v1/runs", headers=ADMIN).status_code == 200
        assert client.post("/login", data={"token": ADMIN_TOKEN}).status_code == 303


@pytest.mark.fault
@pytest.mark.parametrize("wrong", ["guess", "proof"])
def test_x08_wrong_proofs_lock_no_administrator_out(tmp_path: Path, wrong: str) -> None:
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


def test_a_key_is_shown_once_and_kept_as_a_digest(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        made = new_key(client, "read", name="cluster")
        key, gone = made["key"], new_key(client, "admin")
        assert re.fullmatch(r"pfa_read_[0-9A-Za-z]{8}_[0-9A-Za-z]{43}", key)
        assert key.split("_")[2] == made["id"]
        listed = client.get("/api/v1/keys", headers=ADMIN)
        assert key.split("_")[3] not in listed.text
        assert {one["name"] for one in listed.json()["keys"]} == {"cluster", ""}
        assert client.delete(f"/api/v1/keys/{gone['id']}", headers=ADMIN).status_code == 204
        assert client.delete("/api/v1/keys/nothing", headers=ADMIN).status_code == 404
        other = key.replace("pfa_read", "pfa_admin")  # another scope in its name
        assert client.get("/api/v1/keys", headers={"X-API-Key": other}).status_code == 401
        client.get(one_time_path(client))
        entries = client.get("/api/v1/audit", headers=ADMIN).json()["entries"]
        assert {one["who"] for one in entries} == {"admin token"}
        told = [one["action"] for one in entries]
        assert told == ["session.open", "session.link", "key.revoke", "key.create", "key.create"]
    with api(tmp_path) as client:
        assert client.get("/api/v1/runs", headers={"X-API-Key": key}).status_code == 200
        assert client.get("/api/v1/keys", headers=bearer(gone["key"])).status_code == 401
        # written behind the answer, so that a request never waits for it
        until(lambda: any(one["used"] for one in client.get("/api/v1/keys", headers=ADMIN).json()["keys"]))
    for file in (tmp_path / "server-data").iterdir():
        assert key.split("_")[3].encode() not in file.read_bytes(), file


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


def test_a_login_leads_back_to_the_page_that_asked_only(tmp_path: Path) -> None:
    evil = ("//evil.example/", "https://evil.example/", "/\\evil.example", "/\t/evil.example", "")
    with api(tmp_path, auth="required") as client:
        key = new_key(client, "operate")["key"]
        for asked, leads_to in {"/run/r1?x=1-5": "/run/r1?x=1-5", **dict.fromkeys(evil, "/")}.items():
            answer = client.post("/login", data={"token": key, "next": asked})
            assert (answer.status_code, answer.headers["location"]) == (303, leads_to), asked
            assert f'name="next" value="{leads_to}"' in client.get("/login", params={"next": asked}).text
