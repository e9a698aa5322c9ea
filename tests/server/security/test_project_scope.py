"""Who belongs to one project learns nothing of another: not from lists, counts, searches and comparisons, and not from live
updates. Each single route: test_authorization_table.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from fastapi.testclient import TestClient

URL = "ws://127.0.0.1:8420/ws/live"
Headers = dict[str, str]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with api(tmp_path, auth="required") as made:
        for run, project in (("mine", "ours"), ("other", "theirs")):
            send(made, frame({"loss": [2.0, 1.0]}, run=run, project=project, name="same name"), **ADMIN)
        yield made


@pytest.fixture
def reader(client: TestClient) -> Headers:
    """A read key of `ours`."""
    made = client.post("/api/v1/keys", json={"scope": "read", "project": "ours"}, headers=ADMIN).json()
    return {"Authorization": f"Bearer {made['key']}"}


@pytest.mark.fault
def test_x09_lists_counts_and_searches_are_of_ones_own_projects(client: TestClient, reader: Headers) -> None:
    def ask(**query: Any) -> Any:
        return client.get("/api/v1/runs", params=query, headers=reader).json()

    assert [one["run"] for one in ask()["runs"]] == ["mine"]
    assert ask(project="theirs")["runs"] == []
    screen = ask(**{"with": "verdict,latest"})
    assert (screen["total"], screen["counts"]["all"], sum(screen["counts"]["states"].values())) == (1, 1, 1)
    for text in ("theirs", "other", "/th.irs/"):
        found = ask(**{"with": "", "q": text})
        assert (found["total"], found["counts"]["all"]) == (0, 0), text
    timing = client.get("/api/v1/timing", params={"run": ["mine", "other"]}, headers=reader).json()["timing"]
    assert timing.keys() == {"mine"}
    about = client.get("/api/v1/self", headers=reader).json()
    assert (about["counters"], about["storage"]) == ({}, {})
    assert client.get("/metrics", headers=reader).status_code == 403


def test_a_name_means_the_run_that_one_may_see(client: TestClient, reader: Headers) -> None:
    query = {"runs": ["mine", "same name"]}
    assert client.get("/api/v1/compare", params=query, headers=reader).status_code == 200
    for name in ("other", "theirs", "no such run"):
        answer = client.get("/api/v1/compare", params={"runs": ["mine", name]}, headers=reader)
        assert (answer.status_code, answer.json()["error"]["field"]) == (404, "runs")
    hidden, never = (client.get(f"/api/v1/runs/{run}", headers=reader) for run in ("other", "never"))
    assert (hidden.status_code, hidden.text.replace("other", "never")) == (404, never.text), "told alike"


def test_an_operator_of_one_project_silences_in_it_only(client: TestClient) -> None:
    made = client.post("/api/v1/keys", json={"scope": "operate", "project": "ours"}, headers=ADMIN).json()
    operator = {"Authorization": f"Bearer {made['key']}"}
    everywhere = client.post("/api/v1/silences", json={"rule": "data_bound", "for_s": 60}, headers=ADMIN).json()

    def silence(**body: Any) -> Any:
        return client.post("/api/v1/silences", json={"for_s": 60, **body}, headers=operator)

    assert silence(rule="data_bound").status_code == 403
    assert silence(project="theirs").status_code == 404
    assert silence(run="other").status_code == 403
    assert silence(run="same name").json()["project"] == "ours"
    assert silence(project="ours", rule="data_bound").status_code == 201
    listed = client.get("/api/v1/silences", headers=operator).json()["silences"]
    assert {one["project"] for one in listed} == {"ours"}
    assert client.delete(f"/api/v1/silences/{everywhere['id']}", headers=operator).status_code == 404


@pytest.mark.fault
@pytest.mark.parametrize(
    "wanted", [{"runs": [], "names": []}, {"runs": [], "names": [], "bands": True}, {"fleet": True, "names": ["loss"]}]
)
def test_x09_live_updates_are_of_ones_own_projects(client: TestClient, reader: Headers, wanted: dict[str, Any]) -> None:
    with client.websocket_connect(URL, headers=reader) as socket:
        socket.send_json({"subscribe": wanted})
        assert socket.receive_json()["subscribed"] is True
        for run, project in (("other", "theirs"), ("new of theirs", "theirs"), ("mine", "ours")):
            send(client, frame({"loss": [0.5]}, run=run, project=project, seq=2, first_step=3), **ADMIN)
        changed = {"tags": ["changed"]}
        for run in ("other", "mine"):  # in this order: once mine is told, the other would have been
            assert client.patch(f"/api/v1/runs/{run}", json=changed, headers=ADMIN).status_code == 200
        assert client.delete("/api/v1/runs/new of theirs", headers=ADMIN).status_code == 204
        texts = [socket.receive_text()]
        while '"changed"' not in texts[-1]:
            texts.append(socket.receive_text())
    told = "".join(texts)
    assert "mine" in told
    assert "other" not in told and "theirs" not in told


def test_a_socket_ends_when_its_user_may_see_other_projects(client: TestClient) -> None:
    roles = [{"role": "viewer", "project": "ours"}, {"role": "viewer", "project": "theirs"}]
    body = {"name": "ada", "password": "correct horse battery", "roles": roles}
    assert client.post("/api/v1/users", json=body, headers=ADMIN).status_code == 201
    assert client.post("/login", data={"name": "ada", "password": "correct horse battery"}).status_code == 303
    cookie = {"Cookie": f"perfagent_session={client.cookies['perfagent_session']}"}
    with client.websocket_connect(URL, headers=cookie) as socket:
        socket.send_json({"subscribe": {"runs": [], "names": []}})
        assert socket.receive_json()["subscribed"] is True
        changed = threading.Thread(
            target=client.patch, args=("/api/v1/users/ada",), kwargs={"json": {"roles": roles[:1]}, "headers": ADMIN}
        )
        changed.start()
        while (message := socket.receive())["type"] != "websocket.close":
            pass
        assert message["code"] == 1008
        changed.join()
