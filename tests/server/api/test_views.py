"""Views that people save under a name: kept, replaced when asked, deleted, and seen in their project only."""

from __future__ import annotations

from typing import Any

import pytest
from api_builders import ADMIN, frame, send, services_of
from fastapi.testclient import TestClient

VIEWS = "/api/v1/views"


def save(client: TestClient, name: str, headers: dict[str, str] = ADMIN, project: str = "", **body: Any) -> Any:
    given = {"page": "runs", "query": "by=config.lr&q=sweep", **body}
    return client.put(f"{VIEWS}/{name}", json=given, params={"project": project}, headers=headers)


def names(client: TestClient, headers: dict[str, str] = ADMIN) -> list[str]:
    return [one["name"] for one in client.get(VIEWS, headers=headers).json()["views"]]


def test_a_view_is_kept_and_replaced_only_when_asked(client: TestClient) -> None:
    made = save(client, "night sweep").json()
    assert made["address"] == "/runs?by=config.lr&q=sweep"
    again = save(client, "night sweep", page="compare", query="?runs=a,b")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "conflict")
    assert save(client, "night sweep", page="compare", query="?runs=a,b", replace=True).status_code == 200
    (kept,) = client.get(VIEWS, headers=ADMIN).json()["views"]
    assert (kept["address"], kept["who"]) == ("/compare?runs=a,b", made["who"])
    assert client.delete(f"{VIEWS}/night sweep", headers=ADMIN).status_code == 204
    assert names(client) == []
    assert client.delete(f"{VIEWS}/night sweep", headers=ADMIN).status_code == 404


def test_views_are_seen_and_made_in_ones_projects_only(client: TestClient) -> None:
    for project in ("vision", "speech"):
        send(client, frame({"loss": [1.0]}, run=project, project=project), **ADMIN)
        save(client, f"of {project}", project=project)
    save(client, "of all")
    keys = services_of(client).access.keys
    reads, operates = (
        {"Authorization": f"Bearer {keys.create(scope, project='vision')[1]}"} for scope in ("read", "operate")
    )
    assert names(client, reads) == ["of all", "of vision"]
    assert save(client, "mine", reads, project="vision").status_code == 403
    assert save(client, "mine", operates, project="vision").status_code == 200
    assert save(client, "mine", operates).status_code == 403, "of all projects"
    assert save(client, "mine", operates, project="speech").status_code == 404


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("x" * 65, {}, "up to 64 letters"), (" x", {}, "up to 64 letters"), ("x", {"query": "q" * 2049}, "2048"),
        ("x", {"page": "settings"}, "compare"), ("x", {"query": "a\nb"}, "as in the address"), ("x", {"more": 1}, "more"),
    ],
)  # fmt: skip
def test_what_is_no_view_is_refused(client: TestClient, name: str, body: dict[str, Any], said: str) -> None:
    answer = save(client, name, **body)
    assert answer.status_code == 422
    assert said in answer.text
