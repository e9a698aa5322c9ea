"""Users: how they log in, what ends their sessions, and that every change of theirs bears their name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cheap_passwords
import pytest
from api_builders import ADMIN, api, frame, send
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


def change(client: TestClient, name: str, **changed: Any) -> None:
    """As an administrator does, from elsewhere."""
    cookies = dict(client.cookies)
    client.cookies.clear()
    answer = client.patch(f"/api/v1/users/{name}", json=changed, headers=ADMIN)
    client.cookies.update(cookies)
    assert answer.status_code == 200, answer.text


def test_a_user_logs_in_by_name_and_password(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "Ada", (None, "viewer"))
        page = client.get("/login").text
        assert 'name="name"' in page and 'name="password"' in page and "Log in with a key" in page
        assert log_in(client, "Ada", "wrong password") == 401
        assert client.get("/api/v1/runs").status_code == 401
        assert log_in(client, " ada ") == 303, "names differ by more than their case"
        who = client.get("/api/v1/session").json()
        assert (who["who"], who["name"], who["user"], who["may"]) == ("user Ada", "Ada", True, ["read"])
        assert client.get("/api/v1/runs").status_code == 200
        assert client.delete("/api/v1/session").status_code == 204
        assert client.get("/api/v1/runs").status_code == 401


def test_an_unknown_name_is_refused_as_a_wrong_password_is(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "ada", (None, "viewer"))
        checked: list[str | None] = []
        passwords = client.app.state.services.people.passwords  # type: ignore[attr-defined]
        real = passwords.check
        passwords.check = lambda password, hashed: checked.append(hashed) or real(password, hashed)
        answers = [client.post("/login", data={"name": name, "password": "not this one"}) for name in ("ada", "nobody")]
        assert {answer.status_code for answer in answers} == {401}
        assert answers[0].text == answers[1].text
        assert len(checked) == 2 and checked[1] is None, "both cost one comparison"


def test_the_hash_of_nobody_costs_as_much_as_that_of_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PasswordHash, "recommended", cheap_passwords.full_cost)
    passwords = Passwords()
    parameters = [text.rsplit("$", 2)[0] for text in (_OF_NOBODY, passwords.hash(PASSWORD))]
    assert parameters[0] == parameters[1]
    assert not passwords.check("", None)


def test_the_database_holds_no_password(tmp_path: Path) -> None:
    with api(tmp_path) as client:
        add(client, "ada", (None, "viewer"))
        assert PASSWORD not in client.get("/api/v1/users", headers=ADMIN).text
        assert "argon2" not in client.get("/api/v1/users", headers=ADMIN).text
        found = client.app.state.services.people.accounts.find("ada")  # type: ignore[attr-defined]
        assert found.password.startswith("$argon2id$")


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"disabled": True}, 401),
        ({"password": OTHER}, 401),
        ({"roles": []}, 403),
        ({"roles": [{"role": "viewer"}]}, 403),
        ({"roles": [{"role": "admin", "project": "p"}]}, 403),
        ({"roles": [{"role": "admin"}]}, 200),
    ],
)
def test_a_change_counts_for_open_sessions_at_once(tmp_path: Path, changed: dict[str, Any], status: int) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "ada", (None, "admin"))
        assert log_in(client, "ada") == 303
        assert client.get("/api/v1/users").status_code == 200
        change(client, "ada", **changed)
        assert client.get("/api/v1/users").status_code == status


@pytest.mark.sql
def test_a_removed_user_is_out_and_the_name_is_free(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "ada", (None, "viewer"))
        assert log_in(client, "ada") == 303
        assert client.delete("/api/v1/users/ada", headers={**ADMIN, "Cookie": ""}).status_code == 204
        assert client.get("/api/v1/runs").status_code == 401
        client.cookies.clear()
        assert log_in(client, "ada") == 401
        add(client, "ada", (None, "viewer"))
        again = client.post("/api/v1/users", json={"name": "ADA", "password": PASSWORD}, headers=ADMIN)
        assert (again.status_code, again.json()["error"]["code"]) == (409, "exists")


def test_a_login_under_way_while_the_password_changes_opens_nothing(tmp_path: Path) -> None:
    with api(tmp_path, auth="required") as client:
        add(client, "ada", (None, "viewer"))
        people = client.app.state.services.people  # type: ignore[attr-defined]
        real = people.passwords.check

        def slow(password: str, hashed: str | None) -> bool:
            right = real(password, hashed)
            people.accounts.change(people.accounts.find("ada").id, password=people.passwords.hash(OTHER))
            return right

        people.passwords.check = slow
        assert log_in(client, "ada") == 303
        assert client.get("/api/v1/runs").status_code == 401


def test_one_changes_ones_own_password_and_stays_logged_in_here_only(tmp_path: Path) -> None:
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
        client.cookies.clear()
        client.headers["user-agent"] = "a lost laptop"
        assert log_in(client, "ada") == 303
        lost = dict(client.cookies)
        client.cookies.clear()
        client.headers["user-agent"] = "a desk"
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
        made = client.post("/api/v1/keys", json={"scope": "read", "project": "ours"})
        assert made.status_code == 201
        assert client.post("/api/v1/keys", json={"scope": "read"}).status_code == 403
        assert client.post("/api/v1/keys", json={"scope": "read", "project": "theirs"}).status_code == 404
        assert [one["project"] for one in client.get("/api/v1/keys").json()["keys"]] == ["ours"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "a/b", "password": PASSWORD}, "name"),
        ({"name": " ", "password": PASSWORD}, "name"),
        ({"name": "x\ty", "password": PASSWORD}, "name"),
        ({"name": "a" * 129, "password": PASSWORD}, "name"),
        ({"name": "ada", "password": "short"}, "password"),
        ({"name": "ada", "password": "x" * 257}, "password"),
        ({"name": "ada", "password": PASSWORD, "roles": [{"role": "owner"}]}, "roles"),
        ({"name": "ada", "password": PASSWORD, "roles": [{"role": "admin"}, {"role": "viewer"}]}, "roles"),
    ],
)
def test_what_cannot_be_a_user_is_refused_by_field(tmp_path: Path, body: dict[str, Any], field: str) -> None:
    with api(tmp_path) as client:
        answer = client.post("/api/v1/users", json=body, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, field)
