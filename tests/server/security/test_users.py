"""Users: how they log in, what ends their sessions, and that every change of theirs bears their name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cheap_passwords
import pytest
from api_builders import ADMIN, api, frame, send, services_of
from fastapi.testclient import TestClient
from pwdlib import PasswordHash

from perfagent_server.security.passwords import _OF_NOBODY, Passwords

PASSWORD, OTHER = "correct horse battery", "staple horse battery"


def add(client: TestClient, name: str, *roles: tuple[str | None, str], password: str = PASSWORD) -> None:
    """A user with these (project, role)."""
    given = [{"project": project, "role": role} for project, role in roles]
    body = {"name": name, "password": password, "roles": given}
    answer = client.post("/api/v1/users", json=body, headers=ADMIN)
    assert answer.status_code == 201, answer.text


def log_in(client: TestClient, name: str, password: str = PASSWORD) -> int:
    """The status; the cookies of a session are then the client's."""
    return client.post("/login", data={"name": name, "password": password}).status_code


def test_a_user_logs_in_by_name_and_password(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "Ada", (None, "viewer"))
        page = client.get("/login").text
        assert 'name="name"' in page and 'name="password"' in page and "Log in with a key" in page
        wrong = [client.post("/login", data={"name": name, "password": "not this one"}) for name in ("ada", "nobody")]
        assert [answer.status_code for answer in wrong] == [401, 401]
        assert wrong[0].text == wrong[1].text, "an unknown name is refused as a wrong password is"
        assert client.get("/api/v1/runs").status_code == 401
        assert log_in(client, " ada ") == 303, "names differ by more than their case"
        who = client.get("/api/v1/session").json()
        assert (who["who"], who["name"], who["user"], who["may"]) == ("user Ada", "Ada", True, ["read"])
        assert client.get("/api/v1/runs").status_code == 200
        assert client.delete("/api/v1/session").status_code == 204
        assert client.get("/api/v1/runs").status_code == 401
        shown = client.get("/api/v1/users", headers=ADMIN).text
        assert PASSWORD not in shown and "argon2" not in shown
        found = services_of(client).people.accounts.find("ada")
        assert found is not None and str(found.password).startswith("$argon2id$"), "the database holds no password"


def test_the_hash_of_nobody_costs_as_much_as_that_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PasswordHash, "recommended", cheap_passwords.full_cost)
    passwords = Passwords()
    parameters = [text.rsplit("$", 2)[0] for text in (_OF_NOBODY, passwords.hash(PASSWORD))]
    assert parameters[0] == parameters[1]
    assert not passwords.check("", None)


@pytest.mark.sql
def test_a_change_counts_for_open_sessions_at_once(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        for number, (changed, status) in enumerate(
            (
                ({"disabled": True}, 401),
                ({"password": OTHER}, 401),
                ({"roles": []}, 403),
                ({"roles": [{"role": "admin", "project": "p"}]}, 403),
                ({"roles": [{"role": "admin"}]}, 200),
                (None, 401),
            )
        ):
            add(client, f"ada {number}", (None, "admin"))
            assert log_in(client, f"ada {number}") == 303
            assert client.get("/api/v1/users").status_code == 200
            how = {"json": changed} if changed else {}
            other = {**ADMIN, "Cookie": ""}
            client.request("PATCH" if how else "DELETE", f"/api/v1/users/ada {number}", headers=other, **how)
            assert client.get("/api/v1/users").status_code == status, changed
            client.cookies.clear()
        assert log_in(client, "ada 5") == 401
        add(client, "ada 5", (None, "viewer"))  # the name is free
        again = client.post("/api/v1/users", json={"name": "ADA 5", "password": PASSWORD}, headers=ADMIN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "exists")


def test_a_new_password_of_ones_own_ends_other_sessions(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "ada", (None, "viewer"))
        assert log_in(client, "ada") == 303
        elsewhere = dict(client.cookies)
        client.cookies.clear()
        assert log_in(client, "ada") == 303

        def ask(old: str, new: str) -> Any:
            return client.post("/api/v1/session/password", json={"old": old, "password": new})

        assert ask("not the old one", OTHER).json()["error"]["field"] == "old"
        assert ask(PASSWORD, "short").json()["error"]["field"] == "password"
        assert ask(PASSWORD, OTHER).status_code == 204
        assert client.get("/api/v1/runs").status_code == 200
        client.cookies.clear()
        client.cookies.update(elsewhere)
        assert client.get("/api/v1/runs").status_code == 401
        client.cookies.clear()
        assert (log_in(client, "ada"), log_in(client, "ada", OTHER)) == (401, 303)


@pytest.mark.sql
def test_one_sees_and_ends_ones_own_sessions_and_no_others(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "ada", (None, "viewer"))
        add(client, "bob", (None, "admin"))
        assert log_in(client, "bob") == 303
        (of_bob,) = client.get("/api/v1/sessions").json()["sessions"]
        for agent in ("a lost laptop", "a desk"):
            lost = dict(client.cookies)
            client.cookies.clear()
            client.headers["user-agent"] = agent
            assert log_in(client, "ada") == 303
        sessions = client.get("/api/v1/sessions").json()["sessions"]
        assert [(one["agent"], one["current"]) for one in sessions] == [("a desk", True), ("a lost laptop", False)]
        assert client.delete(f"/api/v1/sessions/{of_bob['id']}").status_code == 404
        assert client.delete(f"/api/v1/sessions/{sessions[1]['id']}").status_code == 204
        assert client.get("/api/v1/runs").status_code == 200
        client.cookies.clear()
        client.cookies.update(lost)
        assert client.get("/api/v1/runs").status_code == 401


def test_what_a_user_does_bears_the_name_of_the_user(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        send(client, frame({"loss": [1.0]}), **ADMIN)
        add(client, "ada", ("p", "operator"))
        assert log_in(client, "ada") == 303
        assert client.patch("/api/v1/runs/r1", json={"tags": ["night"]}).status_code == 200
        made = client.post("/api/v1/silences", json={"run": "r1", "for_s": 60})
        assert (made.status_code, made.json()["who"], made.json()["project"]) == (201, "ada", "p")
        client.cookies.clear()
        entries = client.get("/api/v1/audit", params={"who": "user ada"}, headers=ADMIN).json()["entries"]
        told = [(one["action"], one["thing"], one["project"]) for one in entries]
        assert told == [("silence.create", made.json()["id"], "p"), ("run.change", "r1", "p"), ("session.open", "", "")]
        assert "night" in entries[1]["detail"] and entries[0]["origin"] == "testclient"


@pytest.mark.sql
def test_the_audit_log_has_pages_filters_and_failed_logins(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        add(client, "ada", (None, "viewer"))
        assert log_in(client, "ada", "a wrong password") == 401
        assert log_in(client, "my password typed into the wrong field", "x") == 401
        refused = client.get("/api/v1/audit", params={"action": "session.refused"}, headers=ADMIN).json()["entries"]
        assert [one["thing"] for one in refused] == ["", "ada"], "only what is a name is written down"
        first = client.get("/api/v1/audit", params={"limit": 2}, headers=ADMIN).json()
        rest = client.get("/api/v1/audit", params={"limit": 2, "before": first["next"]}, headers=ADMIN).json()
        assert [one["action"] for one in first["entries"] + rest["entries"]] == [*["session.refused"] * 2, "user.add"]
        assert rest["next"] is None
        later = client.get("/api/v1/audit", params={"since": "2100-01-01T00:00:00Z"}, headers=ADMIN).json()
        assert later["entries"] == []
        assert client.get("/api/v1/audit", params={"since": "yesterday"}, headers=ADMIN).status_code == 422


def test_an_administrator_of_a_project_reads_its_audit_log_only(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        for run, project in (("r1", "ours"), ("r2", "theirs")):
            send(client, frame({"loss": [1.0]}, run=run, project=project), **ADMIN)
            assert client.patch(f"/api/v1/runs/{run}", json={"notes": "x"}, headers=ADMIN).status_code == 200
        add(client, "ada", ("ours", "admin"))
        assert log_in(client, "ada") == 303
        assert {one["thing"] for one in client.get("/api/v1/audit").json()["entries"]} == {"r1"}
        for project, status in (({"project": "ours"}, 201), ({}, 403), ({"project": "theirs"}, 404)):
            assert client.post("/api/v1/keys", json={"scope": "read", **project}).status_code == status
        assert [one["project"] for one in client.get("/api/v1/keys").json()["keys"]] == ["ours"]


def test_what_cannot_be_a_user_is_refused_by_field(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        for field, values in {
            "name": ["a/b", " ", "x\ty", "a" * 129],
            "password": ["short", "x" * 257],
            "roles": [[{"role": "owner"}], [{"role": "admin"}, {"role": "viewer"}]],
        }.items():
            for value in values:
                body = {"name": "ada", "password": PASSWORD, field: value}
                answer = client.post("/api/v1/users", json=body, headers=ADMIN)
                assert (answer.status_code, answer.json()["error"]["field"]) == (422, field), value
