"""What people do with alerts and channels over HTTP, under whose name, and how it is undone."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import Receiver, until
from fastapi.testclient import TestClient
from standardwebhooks import Webhook

from perfagent.wire import Event


@pytest.fixture
def client(tmp_path: Path, receiver: Receiver) -> Iterator[TestClient]:
    with api(tmp_path, webhook_allow=(receiver.address,)) as made:
        yield made


def nan(client: TestClient) -> str:
    """The id of an alert."""
    send(client, frame({"loss": [1.0, math.nan]}), **ADMIN)
    [alert] = until(lambda: client.get("/api/v1/alerts?state=firing").json()["alerts"])
    return str(alert["id"])


def history(client: TestClient, ident: str) -> list[tuple[str, str, str]]:
    found = client.get(f"/api/v1/alerts/{ident}").json()["history"]
    return [(one["event"], one["who"], one["note"]) for one in found]


@pytest.mark.sql
def test_each_act_has_an_undo_and_leaves_a_trace(client: TestClient) -> None:
    ident = nan(client)
    address = f"/api/v1/alerts/{ident}"
    acknowledged = client.post(f"{address}/ack", json={"note": "I look into it"}).json()
    assert (acknowledged["acknowledged_by"], acknowledged["note"]) == ("local", "I look into it")
    assert client.post(f"{address}/unack").json()["acknowledged"] is None
    assert client.post(f"{address}/snooze").json()["snoozed_until"].startswith("9999")
    assert client.post(f"{address}/unsnooze").json()["snoozed_until"] is None
    assert client.post(f"{address}/snooze", json={"for_s": 60}).json()["snoozed_until"] is not None
    assert client.post(f"{address}/snooze", json={"for_s": 0}).json()["snoozed_until"] is None
    assert client.post(f"{address}/mute", json={"note": "known"}).json()["muted_until"].startswith("9999")
    assert client.post(f"{address}/unmute").json()["muted_until"] is None
    assert history(client, ident) == [
        ("fired", "", ""), ("acknowledged", "local", "I look into it"), ("unacknowledged", "local", ""),
        ("snoozed", "local", ""), ("unsnoozed", "local", ""), ("snoozed", "local", ""), ("unsnoozed", "local", ""),
        ("muted", "local", "known"), ("unmuted", "local", ""),
    ]  # fmt: skip


def test_who_did_it_is_the_name_of_the_key_or_of_the_login_with_it(client: TestClient) -> None:
    ident = nan(client)
    made = client.post("/api/v1/keys", json={"scope": "operate", "name": "Ada"}, headers=ADMIN).json()
    by_key = {"Authorization": f"Bearer {made['key']}"}
    assert client.post(f"/api/v1/alerts/{ident}/ack", headers=by_key).json()["acknowledged_by"] == "Ada"
    assert client.post("/api/v1/channels", json={"url": "https://8.8.8.8/"}, headers=by_key).status_code == 403
    client.post("/login", data={"token": made["key"]})
    client.post(f"/api/v1/alerts/{ident}/unack")
    assert history(client, ident)[-1] == ("unacknowledged", "Ada", "")
    assert client.get("/api/v1/session").json()["name"] == "Ada"


@pytest.mark.sql
def test_a_silence_is_made_shown_at_its_alerts_and_deleted(client: TestClient, receiver: Receiver) -> None:
    client.post("/api/v1/channels", json={"url": receiver.url}, headers=ADMIN)
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
    until(lambda: receiver.of_type("alert.firing"))
    assert client.delete(f"/api/v1/silences/{silence['id']}").status_code == 404


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"for_s": 60}, None), ({"run": "r"}, "ends"), ({"run": "r", "for_s": 60, "ends": "2030-01-01T00:00:00Z"}, "ends"),
        ({"run": "r", "ends": "soon"}, "ends"), ({"run": "r", "ends": "2020-01-01T00:00:00Z"}, "ends"),
        ({"run": "r", "for_s": 60, "repeats": "hourly"}, "repeats"), ({"run": "r", "for_s": 90000, "repeats": "daily"}, "for_s"),
        ({"rule": "nonsense", "for_s": 60}, "rule"), ({"run": "r", "for_s": -1}, "for_s"), ({"runs": "r", "for_s": 5}, "runs"),
    ],
)  # fmt: skip
def test_a_silence_that_cannot_be_is_refused_with_a_sentence(
    client: TestClient, body: dict[str, Any], field: str | None
) -> None:
    answer = client.post("/api/v1/silences", json=body)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"].get("field") == field


def test_a_rotated_secret_signs_beside_the_old_one_for_a_day(client: TestClient, receiver: Receiver) -> None:
    made = client.post("/api/v1/channels", json={"url": receiver.url}, headers=ADMIN).json()
    rotated = client.post(f"/api/v1/channels/{made['id']}/rotate", headers=ADMIN).json()
    assert rotated["secret"] != made["secret"]
    client.post(f"/api/v1/channels/{made['id']}/test", headers=ADMIN)
    [got] = receiver.of_type("channel.test")
    for secret in (made["secret"], rotated["secret"]):
        Webhook(secret).verify(got.body, got.headers)
    outbox = client.app.state.services.outbox  # type: ignore[attr-defined]
    later = time.time() + 86401
    outbox._clock = lambda: later
    client.post(f"/api/v1/channels/{made['id']}/test", headers=ADMIN)
    signed = receiver.of_type("channel.test")[-1].headers["webhook-signature"]
    assert len(signed.split()) == 1
    assert made["secret"] not in client.get("/api/v1/channels", headers=ADMIN).text


@pytest.mark.sql
def test_a_channel_is_changed_and_what_is_left_out_stays(client: TestClient, receiver: Receiver) -> None:
    made = client.post("/api/v1/channels", json={"url": receiver.url, "name": "hook"}, headers=ADMIN).json()
    address = f"/api/v1/channels/{made['id']}"
    changed = client.patch(address, json={"projects": ["p"], "min_severity": "critical"}, headers=ADMIN).json()
    assert (changed["name"], changed["projects"], changed["min_severity"], changed["enabled"]) == (
        "hook", ["p"], "critical", True,
    )  # fmt: skip
    off = client.patch(address, json={"enabled": False}, headers=ADMIN).json()
    assert (off["enabled"], off["disabled_reason"]) == (False, "switched off by hand")
    wrong = client.patch(address, json={"url": "http://10.0.0.1/"}, headers=ADMIN)
    assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "url")
    assert client.patch("/api/v1/channels/none", json={}, headers=ADMIN).status_code == 404


@pytest.mark.sql
def test_what_became_of_a_run_is_told_once_to_who_asked_for_it(client: TestClient, receiver: Receiver) -> None:
    client.post("/api/v1/channels", json={"url": receiver.url, "summaries": True}, headers=ADMIN)
    client.post("/api/v1/channels", json={"url": receiver.url, "summaries": True, "projects": ["other"]}, headers=ADMIN)
    ended = Event(kind="state", time=time.time(), step=2, data={"state": "finished"})
    client.put("/api/v1/prices", json={"cpu_core_hour": 0.0, "currency": "EUR"}, headers=ADMIN)
    send(client, frame({"loss": [2.0, 1.0], "host/cores": [2.0, 2.0]}, events=[ended]), **ADMIN)
    until(lambda: client.get("/api/v1/runs/r1").json()["state"] == "finished")
    services = client.app.state.services  # type: ignore[attr-defined]
    reports = services.outbox.chores[0].__self__
    for _ in range(2):
        reports.write(time.time() + 21)
        reports._summarised.clear()
    later = time.time() + 60
    services.outbox._clock = lambda: later
    services.outbox.wake()
    [got] = until(lambda: receiver.of_type("run.ended"))
    data = got.json["data"]
    assert (data["run"], data["project"]) == ("r1", "p")
    assert "finished after step 2" in data["alert"]["message"]
    assert data["alert"]["message"].endswith("Alerts: none. It cost 0.00 EUR.")


def test_a_digest_comes_in_its_intervals_and_says_what_is_open(client: TestClient, receiver: Receiver) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    services.outbox.stop()  # its thread writes reports, too
    made = client.post("/api/v1/channels", json={"url": receiver.url, "every_s": 3600}, headers=ADMIN).json()
    send(client, frame({"loss": [2.0, 1.0]}), **ADMIN)
    reports = services.outbox.chores[0].__self__

    def waiting() -> list[str]:
        found = client.get(f"/api/v1/deliveries?channel={made['id']}").json()["deliveries"]
        return [one["event"] for one in found]

    reports.write(time.time() + 1)
    assert waiting() == []
    reports.write(time.time() + 3601)
    assert waiting() == ["digest"]


@pytest.mark.fault
def test_w05_heartbeats_stop_with_the_rules(client: TestClient, receiver: Receiver) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    services.outbox.stop()  # its thread writes reports, too
    wrong = client.post("/api/v1/channels", json={"url": receiver.url, "kind": "heartbeat"}, headers=ADMIN)
    assert "every_s" in wrong.json()["error"]["message"]
    body = {"url": f"{receiver.url}/ping/secret-token", "kind": "heartbeat", "every_s": 10}
    made = client.post("/api/v1/channels", json=body, headers=ADMIN)
    assert made.status_code == 201, made.text
    assert "secret-token" not in client.get("/api/v1/channels", headers=ADMIN).text
    reports = services.outbox.chores[0].__self__
    now = time.time()
    reports.write(now + 11)
    reports.is_well = lambda: False
    reports.write(now + 22)
    waiting = [one for one in client.get("/api/v1/deliveries").json()["deliveries"] if one["event"] == "heartbeat"]
    assert len(waiting) == 1


@pytest.mark.sql
def test_an_alert_that_nobody_acknowledges_is_told_again(client: TestClient, receiver: Receiver) -> None:
    client.post("/api/v1/channels", json={"url": receiver.url, "repeat_s": 600}, headers=ADMIN)
    ident = nan(client)
    [told] = until(lambda: client.get("/api/v1/deliveries?state=delivered").json()["deliveries"])
    created = datetime.fromisoformat(told["created"]).timestamp()
    services = client.app.state.services  # type: ignore[attr-defined]
    reports = services.outbox.chores[0].__self__
    reports.write(created + 599)
    assert len(client.get("/api/v1/deliveries").json()["deliveries"]) == 1
    reports.write(created + 601)
    reports.write(created + 601)
    assert len(client.get("/api/v1/deliveries").json()["deliveries"]) == 2
    client.post(f"/api/v1/alerts/{ident}/ack")
    reports.write(created + 1300)
    assert len(client.get("/api/v1/deliveries").json()["deliveries"]) == 2
