"""While the disk is full people log in, and what has leaked is stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_builders import ADMIN, api, services_of

PASSWORD = "correct horse battery"


@pytest.mark.sqlite
def test_logins_and_revocations_go_on_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own limit of pages stands for the full disk: it fails with the same SQLITE_FULL."""
    with api(tmp_path, auth="required") as client:
        database = services_of(client).database

        def leave(pages: int) -> None:
            def job(connection: Any) -> None:
                there = connection.exec_driver_sql("PRAGMA page_count").scalar()
                connection.exec_driver_sql(f"PRAGMA max_page_count={there + pages}")

            database.write(job, essential=True)

        def ask(method: str, path: str, **more: Any) -> Any:
            return client.request(method, f"/api/v1/{path}", headers=ADMIN, **more)

        for name, role in (("ada", "admin"), ("bob", "viewer")):
            body = {"name": name, "password": PASSWORD, "roles": [{"role": role}]}
            assert ask("POST", "users", json=body).status_code == 201
        one_time = ask("POST", "session/links").json()["url"]
        made = ask("POST", "keys", json={"scope": "read"}).json()
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=0))
        leave(2)
        statuses = (ask("POST", "keys", json={"scope": "read", "name": f"{at}" * 80}).status_code for at in range(200))
        assert 507 in statuses
        assert database.full
        leave(100)  # the room of the reserve
        key = f"keys/{made['id']}"
        assert ask("PATCH", key, json={"limits": {"requests_per_s": 1}}).json()["limits"] == {"requests_per_s": 1}
        assert ask("DELETE", key).status_code == 204
        assert client.get("/api/v1/runs", headers={"X-API-Key": made["key"]}).status_code == 401
        assert ask("PATCH", "users/bob", json={"disabled": True}).status_code == 200
        assert ask("DELETE", "users/bob").status_code == 204
        assert client.post("/login", data={"name": "ada", "password": "a wrong one"}).status_code == 401
        assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 303
        assert client.get("/api/v1/session").json()["name"] == "ada"
        assert client.delete("/api/v1/session").status_code == 204
        assert client.get("/api/v1/runs").status_code == 401
        assert client.get(one_time.removeprefix("http://127.0.0.1:8420")).status_code == 303
        assert client.get("/api/v1/keys").status_code == 200
