"""What people do with alerts and channels over HTTP, under whose name, and how it is undone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient
from posting import Posts

from perfagent.wire import Event


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def clock() -> Clock:
    return Clock(time.time())


@pytest.fixture
def client(tmp_path: Path, posts: Posts, clock: Clock) -> Iterator[TestClient]:
    with api(tmp_path, send=posts, clocks={"clock": clock}) as made:
        yield made


def nan(client: TestClient) -> str:
    """The id of an alert."""
    send(client, frame({"loss": [1.0, math.nan]}), **ADMIN)
    [alert] = until(lambda: client.get("/api/v1/alerts?state=firing").json()["alerts"])
    return str(alert["id"])


def add(client: TestClient, **more: Any) -> dict[str, Any]:
    made = client.post("/api/v1/channels", json={"url": Posts.url, **more}, headers=ADMIN)
    assert made.status_code == 201, made.text
    return dict(made.json())


def events(client: TestClient, **asked: str) -> list[str]:
    return [one["event"] for one in client.get("/api/v1/deliveries", params=asked).json()["deliveries"]]


def report(client: TestClient, at: float) -> None:
    services_of(client).outbox.chores[0](at)


def history(client: TestClient, ident: str) -> list[tuple[str, str, str]]:
    found = client.get(f"/api/v1/alerts/{ident}").json()["history"]
    return [(one["event"], one["who"], one["note"]) for one in found]


@pytest.mark.sql
def test_each_act_has_an_undo_and_leaves_a_trace(client: TestClient) -> None:
    ident = nan(client)

    def act(name: str, **body: Any) -> dict[str, Any]:
        return dict(client.post(f"/api/v1/alerts/{ident}/{name}", json=body).json())

    acknowledged = act("ack", note="I look into it")
    assert (acknowledged["acknowledged_by"], acknowledged["note"]) == ("local", "I look into it")
    assert act("unack")["acknowledged"] is None
    assert act("snooze")["snoozed_until"].startswith("9999")
    assert act("unsnooze")["snoozed_until"] is None
    assert act("snooze", for_s=60)["snoozed_until"] is not None
    assert act("snooze", for_s=0)["snoozed_until"] is None
    assert act("mute", note="known")["muted_until"].startswith("9999")
    assert act("unmute")["muted_until"] is None
    assert history(client, ident) == [
        ("fired", "", ""), ("acknowledged", "local", "I look into it"), ("unacknowledged", "local", ""),
        ("snoozed", "local", ""), ("unsnoozed", "local", ""), ("snoozed", "local", ""), ("unsnoozed", "local", ""),
        ("muted", "local", "known"), ("unmuted", "local", ""),
    ]  # fmt: skip


def test_seconds_of_a_mute_come_in_the_body_or_in_the_query(client: TestClient) -> None:
    address = f"/api/v1/alerts/{nan(client)}/mute"

    def lasts_s(**asked: Any) -> float:
        return datetime.fromisoformat(client.post(address, **asked).json()["muted_until"]).timestamp() - time.time()

    assert lasts_s(json={"for_s": 600}) == pytest.approx(600, abs=30)
    assert lasts_s(params={"for_s": 900}) == pytest.approx(900, abs=30)
    assert client.post(address, params={"for_s": 0}).json()["muted_until"] is None
    twice = {"json": {"for_s": 5}, "params": {"for_s": 6}}
    for wrong in ({"json": {"for_s": -3}}, {"json": {"for_s": "long"}}, {"params": {"for_s": -3}}, twice):
        answer = client.post(address, **wrong)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "for_s")


def test_an_act_is_under_the_name_of_the_key_or_of_the_login_with_it(client: TestClient) -> None:
    ident = nan(client)
    made = client.post("/api/v1/keys", json={"scope": "operate", "name": "Ada"}, headers=ADMIN).json()
    by_key = {"Authorization": f"Bearer {made['key']}"}
    assert client.post(f"/api/v1/alerts/{ident}/ack", headers=by_key).json()["acknowledged_by"] == "Ada"
    assert client.post("/api/v1/channels", json={"url": Posts.url}, headers=by_key).status_code == 403
    client.post("/login", data={"token": made["key"]})
    client.post(f"/api/v1/alerts/{ident}/unack")
    assert history(client, ident)[-1] == ("unacknowledged", "Ada", "")
    assert client.get("/api/v1/session").json()["name"] == "Ada"


@pytest.mark.sql
def test_a_silence_is_made_shown_at_its_alerts_and_deleted(client: TestClient, posts: Posts) -> None:
    add(client)
    made = client.post("/api/v1/silences", json={"run": "r1", "for_s": 3600, "note": "night"})
    assert made.status_code == 201, made.text
    silence = made.json()
    assert (silence["active"], silence["who"], silence["note"]) == (True, "local", "night")
    ident = nan(client)
    assert client.get(f"/api/v1/alerts/{ident}").json()["silenced_until"] == silence["ends"]
    assert [one["id"] for one in client.get("/api/v1/silences").json()["silences"]] == [silence["id"]]
    [waiting] = client.get("/api/v1/deliveries").json()["deliveries"]
    assert (waiting["state"], waiting["tries"]) == ("waiting", 0)
    assert client.delete(f"/api/v1/silences/{silence['id']}").status_code == 204
    until(lambda: posts.arrived == ["firing"])
    assert client.delete(f"/api/v1/silences/{silence['id']}").status_code == 404


def test_a_silence_that_cannot_be_is_refused_by_its_field(client: TestClient) -> None:
    for body, field in [
        ({"for_s": 60}, None), ({"run": "r"}, "ends"), ({"run": "r", "for_s": 60, "ends": "2030-01-01T00:00:00Z"}, "ends"),
        ({"run": "r", "ends": "soon"}, "ends"), ({"run": "r", "ends": "2020-01-01T00:00:00Z"}, "ends"),
        ({"run": "r", "for_s": 60, "repeats": "hourly"}, "repeats"), ({"run": "r", "for_s": 90000, "repeats": "daily"}, "for_s"),
        ({"rule": "nonsense", "for_s": 60}, "rule"), ({"run": "r", "for_s": -1}, "for_s"), ({"runs": "r", "for_s": 5}, "runs"),
    ]:  # fmt: skip
        answer = client.post("/api/v1/silences", json=body)
        assert (answer.status_code, answer.json()["error"].get("field")) == (422, field), body


@pytest.mark.sql
def test_a_channel_is_changed_and_what_is_left_out_stays(client: TestClient) -> None:
    address = f"/api/v1/channels/{add(client, name='hook')['id']}"
    changed = client.patch(address, json={"projects": ["p"], "min_severity": "critical"}, headers=ADMIN).json()
    assert [changed[name] for name in ("name", "projects", "min_severity", "enabled")] == [
        "hook", ["p"], "critical", True,
    ]  # fmt: skip
    off = client.patch(address, json={"enabled": False}, headers=ADMIN).json()
    assert (off["enabled"], off["disabled_reason"]) == (False, "switched off by hand")
    wrong = client.patch(address, json={"url": "http://10.0.0.1/"}, headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "url")
    assert client.patch("/api/v1/channels/none", json={}, headers=ADMIN).status_code == 404


@pytest.mark.sql
def test_what_became_of_a_run_is_told_once(client: TestClient, posts: Posts, clock: Clock) -> None:
    add(client, summaries=True)
    add(client, summaries=True, projects=["other"])
    clock.at = time.time()
    ended = Event(kind="state", time=time.time(), step=2, data={"state": "finished"})
    client.put("/api/v1/prices", json={"cpu_core_hour": 0.0, "currency": "EUR"}, headers=ADMIN)
    send(client, frame({"loss": [2.0, 1.0], "host/cores": [2.0, 2.0]}, events=[ended]), **ADMIN)
    until(lambda: client.get("/api/v1/runs/r1").json()["state"] == "finished")
    for after_s in (21, 42):
        report(client, time.time() + after_s)
    clock.at += 60
    services_of(client).outbox.wake()
    [got] = until(lambda: posts.of_type("run.ended"))
    data = got.json["data"]
    assert (data["run"], data["project"]) == ("r1", "p")
    assert "finished after step 2" in data["alert"]["message"]
    assert data["alert"]["message"].endswith("Alerts: none. It cost 0.00 EUR.")


def test_a_digest_comes_in_its_intervals(client: TestClient) -> None:
    add(client, every_s=3600)
    send(client, frame({"loss": [2.0, 1.0]}), **ADMIN)
    report(client, time.time() + 1)
    assert events(client) == []
    report(client, time.time() + 3601)
    assert events(client) == ["digest"]


@pytest.mark.fault
def test_w05_heartbeats_stop_with_the_rules(client: TestClient) -> None:
    url = f"{Posts.url}/ping/secret-token"
    wrong = client.post("/api/v1/channels", json={"url": url, "kind": "heartbeat"}, headers=ADMIN)
    assert "every_s" in wrong.json()["error"]["message"]
    add(client, url=url, kind="heartbeat", every_s=10)
    assert "secret-token" not in client.get("/api/v1/channels", headers=ADMIN).text
    now, services = time.time(), services_of(client)
    report(client, now + 11)
    services.outbox.chores[0].__self__.is_well = lambda: False  # type: ignore[attr-defined]
    report(client, now + 22)
    assert events(client) == ["heartbeat"]


@pytest.mark.sql
def test_an_alert_that_nobody_acknowledges_is_told_again(client: TestClient) -> None:
    add(client, repeat_s=600)
    ident = nan(client)
    [told] = until(lambda: client.get("/api/v1/deliveries?state=delivered").json()["deliveries"])
    created = datetime.fromisoformat(told["created"]).timestamp()

    def messages(after_s: float) -> int:
        report(client, created + after_s)
        return len(events(client))

    assert [messages(599), messages(601), messages(601)] == [1, 2, 2]
    client.post(f"/api/v1/alerts/{ident}/ack")
    assert messages(1300) == 2
