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


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path, samples_days=30.0) as running:
        yield running


def in_force(client: TestClient, project: str) -> dict[str, Any]:
    policies = client.get("/api/v1/retention").json()["policies"]
    return {one["project"]: one["in_force"] for one in policies}[project]


def test_a_project_has_its_own_and_inherits_the_rest(client: TestClient) -> None:
    put = client.put("/api/v1/retention", json={"runs_days": 90}, headers=ADMIN)
    assert put.status_code == 200, put.text
    put = client.put("/api/v1/retention?project=q", json={"samples_days": "forever", "max_bytes": 1e9}, headers=ADMIN)
    assert put.json()["set"] == {"samples_days": "forever", "max_bytes": 1e9}
    default, own = in_force(client, ""), in_force(client, "q")
    assert (default["samples_days"], default["runs_days"], default["max_bytes"]) == (30, 90, None)
    assert (own["samples_days"], own["runs_days"], own["max_bytes"]) == (None, 90, 1e9)
    assert client.delete("/api/v1/retention?project=q", headers=ADMIN).status_code == 204
    assert client.delete("/api/v1/retention?project=q", headers=ADMIN).status_code == 404
    assert client.get("/api/v1/self").json()["retention_days"]["runs"] == 90


@pytest.mark.parametrize(
    "body", [{}, {"samples_days": 0}, {"samples_days": -1}, {"samples_days": "never"}, {"samples": 3}]
)
def test_what_cannot_be_is_refused(client: TestClient, body: dict[str, Any]) -> None:
    answer = client.put("/api/v1/retention", json=body, headers=ADMIN)
    assert answer.status_code == 422, answer.text
    assert [one["project"] for one in client.get("/api/v1/retention").json()["policies"]] == [""]


def test_the_preview_of_a_young_server_is_empty(client: TestClient) -> None:
    send(client, frame({"loss": [1.0]}), **ADMIN)
    found = client.get("/api/v1/retention/preview").json()
    assert found["runs"] == found["aged"] == found["budgets"] == []


def test_the_command_sets_lists_previews_and_takes_back(tmp_path: Path) -> None:
    with server_process(tmp_path / "server") as server:
        where = ("--data", str(server.folder / "server-data"))
        done = perfagent(
            tmp_path, "retention", "set", "--project", "q", "--samples-days", "7", "--runs-days", "forever", *where
        )
        assert done.returncode == 0, done.stderr
        assert "q: samples_days 7" in done.stdout
        listed = json.loads(perfagent(tmp_path, "retention", "list", "--json", *where).stdout)
        assert [one["project"] for one in listed["policies"]] == ["", "q"]
        assert "forever" in perfagent(tmp_path, "retention", "list", *where).stdout
        assert "nothing would go" in perfagent(tmp_path, "retention", "preview", *where).stdout
        assert perfagent(tmp_path, "retention", "remove", "--project", "q", *where).returncode == 0
        again = perfagent(tmp_path, "retention", "remove", "--project", "q", *where)
        assert again.returncode == 1
        assert "perfagent retention list" in again.stderr
        assert perfagent(tmp_path, "retention", "set", *where).returncode != 0


def test_a_change_keeps_what_it_does_not_name_and_one_value_is_taken_back(client: TestClient) -> None:
    of_q = "/api/v1/retention?project=q"
    assert client.patch(of_q, json={"samples_days": 3, "runs_days": "forever"}, headers=ADMIN).status_code == 200
    shown = client.patch(of_q, json={"max_bytes": 5e9}, headers=ADMIN).json()
    assert shown["set"] == {"samples_days": 3, "runs_days": "forever", "max_bytes": 5e9}
    assert (shown["in_force"]["samples_days"], shown["in_force"]["runs_days"]) == (3, None)
    assert client.patch(of_q, json={}, headers=ADMIN).status_code == 422
    assert client.delete(f"{of_q}&field=samples_days", headers=ADMIN).status_code == 204
    assert in_force(client, "q")["samples_days"] == 30, "that of all projects"
    assert in_force(client, "q")["max_bytes"] == 5e9
    assert client.delete(f"{of_q}&field=samples_days", headers=ADMIN).status_code == 404
    assert client.delete(f"{of_q}&field=samples", headers=ADMIN).status_code == 422
    assert client.delete(f"{of_q}&field=max_bytes&field=runs_days", headers=ADMIN).status_code == 204
    policies = client.get("/api/v1/retention").json()["policies"]
    assert [one["project"] for one in policies] == [""]


def test_the_commands_of_the_operations_page_keep_what_was_set_before(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    commands = [line.split()[1:] for line in page.splitlines() if line.startswith("perfagent retention set ")]
    assert len(commands) == 4
    with server_process(tmp_path / "server") as server:
        where = ("--data", str(server.folder / "server-data"))
        more = [
            ["retention", "set", "--max-bytes", "9e11"],
            ["retention", "set", "--project", "paper", "--max-bytes", "8e9"],
        ]
        said = [perfagent(tmp_path, *words, *where) for words in (*commands, *more)]
        assert [done.returncode for done in said] == [0] * 6, said
        listed = json.loads(perfagent(tmp_path, "retention", "list", "--json", *where).stdout)
        perfagent(tmp_path, "retention", "remove", "--project", "scratch", "--max-bytes", *where)
        after = json.loads(perfagent(tmp_path, "retention", "list", "--json", *where).stdout)
    found = {one["project"]: one["set"] for one in listed["policies"]}
    assert found == {
        "": {"samples_days": 30, "rollup16_days": 180, "runs_days": 1000, "max_bytes": 9e11},
        "scratch": {"samples_days": 3, "runs_days": 14, "max_bytes": 5e9},
        "paper": {"samples_days": "forever", "runs_days": "forever", "max_bytes": 8e9},
    }
    assert (
        "paper: samples_days forever, rollup16_days 180, runs_days forever, max_bytes 8,000,000,000" in said[-1].stdout
    )
    left = {one["project"]: one["set"] for one in after["policies"]}
    assert left == {**found, "scratch": {"samples_days": 3, "runs_days": 14}}


@pytest.mark.parametrize("place", ["retention", "prices", "rules/hang"])
def test_a_project_may_be_as_long_as_frames_may_name_it(client: TestClient, place: str) -> None:
    body = {"retention": {"runs_days": 9}, "prices": {"currency": "EUR", "gpu_hour": 1.0}}.get(
        place, {"enabled": False}
    )
    for project, status in (("é" * 128, 200), ("é" * 128 + "p", 422)):
        answer = client.put(f"/api/v1/{place}", params={"project": project}, json=body, headers=ADMIN)
        assert answer.status_code == status, answer.text
