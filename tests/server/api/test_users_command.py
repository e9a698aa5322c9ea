"""`perfagent users`: against a running server, and before its first start."""

from __future__ import annotations

import io
import json
import os
import pwd
from pathlib import Path
from unittest import mock

import pytest
from builders import ServerProcess, server_process, web
from commands import Ended, perfagent

from perfagent.endpoint.local_server import ADMIN_TOKEN_FILE

pytestmark = pytest.mark.real
PASSWORD = "correct horse battery"


def users(folder: Path, data: Path, *arguments: str, password: str = PASSWORD) -> Ended:
    with mock.patch("sys.stdin", io.StringIO(password + "\n")):
        return perfagent(folder, "users", *arguments, "--data", str(data))


def log_in(server: ServerProcess, name: str, password: str = PASSWORD) -> int:
    return web().post(f"{server.url}/login", data={"name": name, "password": password}).status_code


@pytest.mark.sqlite
def test_users_are_managed_before_the_first_start_and_later(tmp_path: Path) -> None:
    data = tmp_path / "s" / "server-data"

    def ada(*words: str, password: str = PASSWORD) -> Ended:
        return users(tmp_path, data, *words, password=password)

    added = ada("add", "root", "--role", "admin", "--password-stdin")
    assert added.returncode == 0, added.stderr
    made = perfagent(tmp_path, "keys", "create", "read", "--name", "screen", "--project", "vision", "--data", str(data))
    assert made.returncode == 0, made.stderr
    with server_process(tmp_path / "s", "--host", "0.0.0.0") as server:
        assert web().get(f"{server.url}/api/v1/runs").status_code == 401
        assert log_in(server, "root") == 303
        token = (data / ADMIN_TOKEN_FILE).read_text().strip()
        answer = web().get(f"{server.url}/api/v1/audit", headers={"Authorization": f"Bearer {token}"})
        added = ada("add", "ada", "--role", "operator", "--project", "a", "--project", "b", "--password-stdin")
        assert (added.returncode, added.stdout) == (0, "ada may log in: operator of a, operator of b\n"), added.stderr
        assert log_in(server, "ada") == 303
        assert ada("role", "ada", "none", "--project", "a").stdout == "ada: operator of b\n"
        assert ada("role", "ADA", "viewer").stdout == "ada: viewer of all projects, operator of b\n"
        listed = json.loads(ada("list", "--json").stdout)["users"]
        assert [(one["name"], len(one["roles"])) for one in listed] == [("ada", 2), ("root", 1)]
        assert "viewer of all projects" in ada("list").stdout
        for what, status in (("disable", 401), ("enable", 303)):
            assert ada(what, "ada").returncode == 0
            assert log_in(server, "ada") == status
        assert ada("password", "ada", "--password-stdin", password="another long one").returncode == 0
        assert (log_in(server, "ada"), log_in(server, "ada", "another long one")) == (401, 303)
        assert [ada("remove", "ada").returncode for _ in range(2)] == [0, 1]
        for words, password, code, said in (
            (("add", "Root", "--password-stdin"), PASSWORD, 1, "already"),
            (("remove", "ada"), PASSWORD, 1, "`perfagent users list`"),
            (("add", "eve"), PASSWORD, 2, "--password-stdin"),  # it is asked for at a terminal only
            (("add", "eve", "--password-stdin"), "short", 2, "10 to 256"),
        ):
            refused = ada(*words, password=password)
            assert (refused.returncode, said in refused.stderr) == (code, True), refused.stderr
    who = f"command line (OS user {pwd.getpwuid(os.getuid()).pw_name})"
    rows = [[one[name] for name in ("who", "action", "thing", "project", "detail")] for one in answer.json()["entries"]]
    key, user = ["key.create", "screen", "vision", "read"], ["user.add", "root", "", "admin of all projects"]
    assert rows[1:] == [[who, *key], [who, *user]]
