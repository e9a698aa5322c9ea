"""The inbox: alerts that are alike as one group, its four lists, and acknowledging several at once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from api_builders import ADMIN, frame, send, services_of
from fastapi.testclient import TestClient
from sqlalchemy import insert

from perfagent_server.store.tables import alert


def fill(client: TestClient, rows: Sequence[tuple[str, str, str, str]], **more: Any) -> None:
    """rows: (id, run, severity, title), each older than the one before it."""
    for run in sorted({row[1] for row in rows}):
        send(client, frame({"loss": [1.0]}, run=run, project="p", name=f"name of {run}"), **ADMIN)
    usual = {"rule": "user_alert", "state": "firing", "message": "", "fix": ""}
    values = [
        {**usual, "id": ident, "run": run, "severity": severity, "title": title, "since": time.time() - place, **more}
        for place, (ident, run, severity, title) in enumerate(rows)
    ]
    services_of(client).database.write(lambda connection: connection.execute(insert(alert), values) and None)


def inbox(client: TestClient, **query: Any) -> dict[str, Any]:
    answer = client.get("/api/v1/alerts/inbox", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


ALIKE = [(f"a{one}", f"r{one % 3}", "warning", f"silent after step {one}, `layer.{one}`") for one in range(9)]


def test_alerts_alike_are_one_group_and_the_worst_is_first(client: TestClient) -> None:
    fill(client, [*ALIKE, ("b1", "r1", "critical", "The loss is NaN"), ("b2", "r2", "warning", "silent for ever")])
    found = inbox(client)
    assert found["counts"] == {"open": 11, "acknowledged": 0, "quiet": 0, "resolved": 0}
    assert found["severities"] == {"info": 0, "warning": 10, "critical": 1}
    told = [
        (one["title"], one["count"], one["runs"], [each["id"] for each in one["alerts"]]) for one in found["groups"]
    ]
    assert told == [
        ("The loss is NaN", 1, 1, ["b1"]), ("silent after step …, …", 9, 3, []), ("silent for ever", 1, 1, ["b2"]),
    ]  # fmt: skip
    [group] = inbox(client, key=found["groups"][1]["key"], limit=4)["groups"]
    assert (group["count"], [one["id"] for one in group["alerts"]]) == (9, ["a0", "a1", "a2", "a3"])


@pytest.mark.parametrize(
    ("asked", "count"),
    [({"q": "name of r1"}, 4), ({"q": "NaN loss"}, 1), ({"q": "step 10"}, 0), ({"severity": "critical"}, 1)],
)
def test_a_search_counts_only_what_it_shows(client: TestClient, asked: dict[str, str], count: int) -> None:
    fill(client, [*ALIKE, ("b1", "r1", "critical", "The loss is NaN")])
    found = inbox(client, **asked)
    assert found["counts"]["open"] == sum(group["count"] for group in found["groups"]) == count


def test_a_search_knows_what_alerts_are_called_in_chinese(client: TestClient) -> None:
    fill(client, [("a", "r1", "warning", "Waiting for a batch")], rule="data_bound")
    fill(client, [("b", "r1", "warning", "The loss is NaN")], rule="nan_loss")
    client.headers["Accept-Language"] = "zh"
    assert [one["rule"] for one in inbox(client, q="等待 batch")["groups"]] == ["data_bound"]


def test_each_alert_stands_in_one_of_four_lists(client: TestClient) -> None:
    fill(client, [("open", "r1", "warning", "a")])
    fill(client, [("seen", "r1", "warning", "a")], acknowledged=1.0)
    fill(client, [("over", "r1", "warning", "a")], state="resolved")
    fill(client, [("later", "r1", "warning", "a")], snoozed_until=time.time() + 60)
    views = {view: inbox(client, view=view) for view in ("open", "acknowledged", "quiet", "resolved")}
    assert {view: [one["id"] for one in found["groups"][0]["alerts"]] for view, found in views.items()} == {
        "open": ["open"], "acknowledged": ["seen"], "quiet": ["later"], "resolved": ["over"],
    }  # fmt: skip
    assert all(found["counts"] == dict.fromkeys(views, 1) for found in views.values())
    wrong = client.get("/api/v1/alerts/inbox", params={"view": "closed"})
    assert (wrong.status_code, wrong.json()["error"]["message"]) == (
        422, "view is 'closed'; allowed are open, acknowledged, quiet, resolved",
    )  # fmt: skip


def test_several_are_acknowledged_at_once_and_taken_back(client: TestClient) -> None:
    fill(client, ALIKE)
    asked = {"alerts": ["a0", "a1"], "runs": ["r2", "unknown"], "note": "a disk"}
    changed = client.post("/api/v1/alerts/ack", json=asked).json()["alerts"]
    assert sorted(changed) == ["a0", "a1", "a2", "a5", "a8"]
    assert client.get("/api/v1/alerts/a5").json()["note"] == "a disk"
    assert client.post("/api/v1/alerts/ack", json=asked).json() == {"alerts": []}, "those stay as they are"
    assert inbox(client)["counts"] == {"open": 4, "acknowledged": 5, "quiet": 0, "resolved": 0}
    assert client.post("/api/v1/alerts/unack", json={"alerts": changed}).json() == {"alerts": changed}
    history = [one["event"] for one in client.get("/api/v1/alerts/a0").json()["history"]]
    assert history == ["acknowledged", "unacknowledged"]
    audit = client.get("/api/v1/audit", headers=ADMIN).json()
    assert sum(row["action"] == "alert.ack" for row in audit["entries"]) == 5


def test_an_alert_that_is_not_there_changes_none(client: TestClient) -> None:
    fill(client, ALIKE)
    answer = client.post("/api/v1/alerts/ack", json={"alerts": ["a0", "gone"]})
    assert (answer.status_code, answer.json()["error"]["message"]) == (
        404, "there is no alert 'gone'; GET /api/v1/alerts lists them",
    )  # fmt: skip
    assert inbox(client)["counts"]["open"] == 9
