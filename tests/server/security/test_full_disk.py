"""While the disk is full people log in, and what has leaked is stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_builders import ADMIN, api
from fastapi.testclient import TestClient

PASSWORD = "correct horse battery"
pytestmark = pytest.mark.sqlite


def fill(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own limit of pages stands for the full disk: it fails with the same SQLITE_FULL."""
    database = client.app.state.services.database  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))

    def leave(pages: int) -> None:
        def job(connection: Any) -> None:
            there = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={there + pages}")

        database.write(job, essential=True)

    leave(2)
    for number in range(200):
        if (
            client.post("/api/v1/keys", json={"scope": "read", "name": f"{number}" * 80}, headers=ADMIN).status_code
            == 507
        ):
            break
    assert database.full
    leave(100)  # the room of the reserve


def test_people_log_in_and_out_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path, auth="required") as client:
        body = {"name": "ada", "password": PASSWORD, "roles": [{"role": "admin"}]}
        assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
        one_time = client.post("/api/v1/session/links", headers=ADMIN).json()["url"]
        fill(client, monkeypatch)
        assert client.post("/login", data={"name": "ada", "password": "a wrong one"}).status_code == 401
        assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 303
        assert client.get("/api/v1/session").json()["name"] == "ada"
        assert client.delete("/api/v1/session").status_code == 204
        assert client.get("/api/v1/runs").status_code == 401
        assert client.get(one_time.removeprefix("http://127.0.0.1:8420")).status_code == 303
        assert client.get("/api/v1/keys").status_code == 200


def test_keys_and_users_are_stopped_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api(tmp_path, auth="required") as client:
        body = {"name": "ada", "password": PASSWORD, "roles": [{"role": "viewer"}]}
        assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
        made = client.post("/api/v1/keys", json={"scope": "read"}, headers=ADMIN).json()
        fill(client, monkeypatch)
        key = f"/api/v1/keys/{made['id']}"
        limited = client.patch(key, json={"limits": {"requests_per_s": 1}}, headers=ADMIN)
        assert limited.json()["limits"] == {"requests_per_s": 1}
        assert client.delete(key, headers=ADMIN).status_code == 204
        assert client.get("/api/v1/runs", headers={"X-API-Key": made["key"]}).status_code == 401
        assert client.patch("/api/v1/users/ada", json={"disabled": True}, headers=ADMIN).status_code == 200
        assert client.delete("/api/v1/users/ada", headers=ADMIN).status_code == 204
