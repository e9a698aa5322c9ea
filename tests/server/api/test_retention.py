"""Retention over HTTP and by the command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import server_process
from commands import perfagent
from fastapi.testclient import TestClient

OF_Q = "/api/v1/retention?project=q"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path, samples_days=30.0) as running:
        yield running


def policies(client: TestClient) -> dict[str, dict[str, Any]]:
    """What is in force, by project."""
    found = client.get("/api/v1/retention").json()["policies"]
    return {one["project"]: one["in_force"] for one in found}


def test_a_project_has_its_own_and_inherits_the_rest(client: TestClient) -> None:
    def ask(method: str, address: str = OF_Q, **body: Any) -> Any:
        return client.request(method, address, headers=ADMIN, **({"json": body} if body else {}))

    assert ask("PUT", "/api/v1/retention", runs_days=90).status_code == 200
    assert ask("PUT", samples_days="forever", max_bytes=1e9).json()["set"] == {
        "samples_days": "forever",
        "max_bytes": 1e9,
    }
    found = policies(client)
    assert [found[""][name] for name in ("samples_days", "runs_days", "max_bytes")] == [30, 90, None]
    assert [found["q"][name] for name in ("samples_days", "runs_days", "max_bytes")] == [None, 90, 1e9]
    assert client.get("/api/v1/self").json()["retention_days"]["runs"] == 90
    # a change keeps what it does not name
    shown = ask("PATCH", samples_days=3, max_bytes=5e9).json()
    assert (shown["set"], shown["in_force"]["samples_days"]) == ({"samples_days": 3, "max_bytes": 5e9}, 3)
    # and one value is taken back
    assert ask("DELETE", f"{OF_Q}&field=samples_days").status_code == 204
    assert [policies(client)["q"][name] for name in ("samples_days", "max_bytes")] == [30, 5e9]
    for field, status in (("samples_days", 404), ("samples", 422), ("max_bytes&field=max_bytes", 204)):
        assert ask("DELETE", f"{OF_Q}&field={field}").status_code == status
    assert list(policies(client)) == [""]
    assert ask("PUT", runs_days=1).status_code == 200
    assert [ask("DELETE").status_code for _ in range(2)] == [204, 404]


def test_what_cannot_be_is_refused(client: TestClient) -> None:
    for body in ({}, {"samples_days": 0}, {"samples_days": -1}, {"samples_days": "never"}, {"samples": 3}):
        for method in ("PUT", "PATCH"):
            answer = client.request(method, "/api/v1/retention", json=body, headers=ADMIN)
            assert answer.status_code == 422, answer.text
    assert list(policies(client)) == [""]
    send(client, frame({"loss": [1.0]}), **ADMIN)
    found = client.get("/api/v1/retention/preview").json()
    assert found["runs"] == found["aged"] == found["budgets"] == []


@pytest.mark.real
def test_the_commands_of_operations_md_set_list_and_take_back(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "server" / "operations.md").read_text(encoding="utf-8")
    commands = [line.split()[2:] for line in page.splitlines() if line.startswith("perfagent retention set ")]
    assert len(commands) == 4
    with server_process(tmp_path / "server") as server:

        def retention(*words: str) -> Any:
            return perfagent(tmp_path, "retention", *words, "--data", str(server.folder / "server-data"))

        def listed() -> dict[str, Any]:
            return {one["project"]: one["set"] for one in json.loads(retention("list", "--json").stdout)["policies"]}

        more = [["set", "--max-bytes", "9e11"], ["set", "--project", "paper", "--max-bytes", "8e9"]]
        done = [retention(*words) for words in (*commands, *more)]
        assert [one.returncode for one in done] == [0] * 6, done
        found = listed()
        assert found == {
            "": {"samples_days": 30, "rollup16_days": 180, "runs_days": 1000, "max_bytes": 9e11},
            "scratch": {"samples_days": 3, "runs_days": 14, "max_bytes": 5e9},
            "paper": {"samples_days": "forever", "runs_days": "forever", "max_bytes": 8e9},
        }
        for part in ("paper: samples_days forever", "rollup16_days 180", "max_bytes 8,000,000,000"):
            assert part in done[-1].stdout
        assert "forever" in retention("list").stdout
        assert "nothing would go" in retention("preview").stdout
        assert retention("remove", "--project", "scratch", "--max-bytes").returncode == 0
        assert retention("remove", "--project", "paper").returncode == 0
        assert listed() == {"": found[""], "scratch": {"samples_days": 3, "runs_days": 14}}
        again = retention("remove", "--project", "paper")
        assert (again.returncode, "perfagent retention list" in again.stderr) == (1, True)
        assert retention("set").returncode != 0
