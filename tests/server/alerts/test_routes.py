"""Tests the routes of channels, alerts and verdicts on a whole server: people's actions, their author, and their undo."""

from __future__ import annotations

import math
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send, services_of
from builders import Receiver, until
from clocks import Clock
from fastapi.testclient import TestClient
from frames import state
from posting import Posts
from standardwebhooks import Webhook

from perfagent.wire import Event
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy


class Agent:
    """Sends frames of a run as an agent does."""

    def __init__(self, client: TestClient) -> None:
        self.client, self.seq = client, 0

    def send(self, first: int, *, how: str = "", **columns: list[float]) -> None:
        self.seq += 1
        values = {name.replace("__", "/"): column for name, column in columns.items()}
        said = [state(how, time=time.time(), world_size=1)] if how else []
        send(self.client, frame(values, seq=self.seq, first_step=first, events=said, name="gpt"))

    def fails(self) -> dict[str, Any]:
        """The alert of a loss that becomes NaN in step 2."""
        self.send(1, how="starting", loss=[1.0, math.nan])
        [alert] = until(lambda: alerts(self.client, state="firing"))
        return dict(alert)


@pytest.fixture
def agent(client: TestClient) -> Agent:
    return Agent(client)


def add(client: TestClient, url: str = Posts.url, **more: Any) -> dict[str, str]:
    made = client.post("/api/v1/channels", json={"name": "hook", "kind": "webhook", "url": url, **more}, headers=ADMIN)
    assert made.status_code == 201, made.text
    return dict(made.json())


def alerts(client: TestClient, **params: str) -> list[dict[str, Any]]:
    return list(client.get("/api/v1/alerts", params=params).json()["alerts"])


def resolve(client: TestClient, alert: dict[str, Any]) -> dict[str, Any]:
    return dict(client.post(f"/api/v1/alerts/{alert['id']}/resolve").json())


@pytest.mark.real
def test_a_nan_reaches_a_receiver_signed_and_is_in_every_answer(tmp_path: Path, receiver: Receiver) -> None:
    with api(tmp_path, webhook_allow=(receiver.address,)) as client:
        made = add(client, receiver.url)
        Agent(client).send(1, how="starting", loss=[3.0, 2.0, 1.0, math.nan], grad__norm=[1.0, 1.0, 1.0, math.nan])
        [got] = until(lambda: receiver.of_type("alert.firing"))
        Webhook(made["secret"]).verify(got.body, got.headers)
        data = got.json["data"]
        assert data["alert"]["rule"] == "nonfinite_loss"
        assert (data["run"], data["run_name"], data["project"]) == ("r1", "gpt", "p")
        assert data["url"] == "http://127.0.0.1:8420/run/r1"
        [alert] = alerts(client)
        assert (alert["id"], alert["state"], alert["since_step"]) == (data["alert"]["id"], "firing", 4)
        verdict = client.get("/api/v1/runs/r1/verdict").json()
        assert (verdict["rule"], verdict["evidence"]["value"]) == ("nonfinite_loss", "NaN")
        findings = client.get("/api/v1/runs/r1/findings").json()["findings"]
        assert [found["rule"] for found in findings] == ["nonfinite_loss", "nonfinite_gradient"]
        assert client.get("/api/v1/runs/r1/alerts").json()["alerts"] == [alert]


def test_alerts_are_filtered_and_resolved(client: TestClient, agent: Agent) -> None:
    alert = agent.fails()
    assert alerts(client, state="firing", severity="critical", run="r1") == [alert]
    assert alerts(client, state="resolved") == alerts(client, severity="info") == alerts(client, run="other") == []
    closed = resolve(client, alert)
    assert (closed["state"], closed["evidence"]["resolved"]) == ("resolved", "resolved by local")
    assert resolve(client, alert)["state"] == "resolved"
    verdict = client.get("/api/v1/runs/r1/verdict").json()
    assert verdict["rule"] == "nonfinite_loss", "closing an alert does not heal the run"
    agent.send(3, loss=[math.nan])
    [again] = until(lambda: alerts(client, state="firing"))
    assert again["id"] == alert["id"]
    assert (again["resolved"], again["evidence"]) == (None, alert["evidence"])
    assert [event for event, _, _ in history(client, alert["id"])] == ["fired", "resolved", "reopened"]
    evidence = client.get("/api/v1/runs/r1/verdict").json()["evidence"]
    assert {name: evidence[name] for name in alert["evidence"]} == alert["evidence"]


def test_alert_about_the_result_outlives_its_run(client: TestClient, agent: Agent) -> None:
    alert = agent.fails()
    agent.send(3, how="finished")
    until(lambda: client.get("/api/v1/runs/r1").json()["state"] == "finished")
    assert [one["state"] for one in alerts(client)] == ["firing"]
    assert client.get("/api/v1/runs/r1/verdict").json()["rule"] == "nonfinite_loss"
    assert resolve(client, alert)["state"] == "resolved"


def test_a_nan_logged_as_json_is_told_under_the_name_of_its_run(client: TestClient, posts: Posts) -> None:
    add(client)
    for loss in (1.0, "NaN"):
        row = {"project": "lab", "run": "my net", "metrics": {"loss": loss}}
        assert client.post("/api/v1/log", json=row).is_success
    [got] = until(lambda: posts.of_type("alert.firing"))
    data = got.json["data"]
    assert (data["run_name"], data["project"], data["alert"]["rule"]) == ("my net", "lab", "nonfinite_loss")
    assert (data["alert"]["ranks"], data["evidence"]["last_losses"]) == ([0], [1.0])


def test_channel_is_shown_without_secret_tested_and_removed(client: TestClient, posts: Posts) -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert add(client, secret=secret)["secret"] == secret
    made = add(client)
    assert made["secret"].startswith("whsec_")
    shown = client.get("/api/v1/channels", headers=ADMIN).json()["channels"]
    assert made["id"] in {one["id"] for one in shown}
    assert not any("secret" in one for one in shown)
    address = f"/api/v1/channels/{made['id']}"
    tried = client.post(f"{address}/test", headers=ADMIN).json()
    assert (tried["state"], tried["status"]) == ("delivered", 200)
    [got] = posts.of_type("channel.test")
    Webhook(made["secret"]).verify(got.body, got.headers)
    posts.answer = lambda _: 500
    tried = client.post(f"{address}/test", headers=ADMIN).json()
    assert (tried["state"], tried["status"], tried["tries"]) == ("failed", 500, 1), "it is not repeated"
    assert [row["event"] for row in client.get("/api/v1/deliveries").json()["deliveries"]] == ["channel.test"] * 2
    for path in (f"DELETE {address}", f"POST {address}/test", "GET /api/v1/channels", "POST /api/v1/channels"):
        assert client.request(*path.split(), json={"url": Posts.url}).status_code == 401, "only an administrator may"
    assert client.delete(address, headers=ADMIN).status_code == 204
    assert client.delete(address, headers=ADMIN).status_code == 404
    assert client.post(f"{address}/test", headers=ADMIN).status_code == 404


def test_a_channel_that_cannot_be_is_refused_with_code_and_field(client: TestClient) -> None:
    for body, code in [
        ({"url": "http://127.0.0.1:1/x"}, "address_not_allowed"), ({"url": "http://10.0.0.1/x"}, "address_not_allowed"),
        ({"url": "file:///etc/passwd"}, "invalid"), ({"url": "nonsense"}, "invalid"), ({"url": "http://a..b/"}, "invalid"),
        ({"url": f"http://{'a' * 64}.com/"}, "invalid"), ({"url": "http://\u200b/"}, "invalid"), ({}, "invalid"),
        ({"url": Posts.url, "kind": "mail"}, "invalid"), ({"url": Posts.url, "min_severity": "high"}, "invalid"),
        ({"url": Posts.url, "secret": "short"}, "invalid"), ({"url": Posts.url, "secret": " "}, "invalid"),
    ]:  # fmt: skip
        answer = client.post("/api/v1/channels", json={"name": "x", **body}, headers=ADMIN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, code), body
        assert answer.json()["error"].get("field", "url") == "url" or len(body) > 1


def test_unknown_runs_and_alerts_are_404(client: TestClient) -> None:
    for path in ("/runs/none/verdict", "/runs/none/findings", "/runs/none/alerts"):
        assert client.get(f"/api/v1{path}").status_code == 404
    for action in ("ack", "mute", "resolve"):
        assert client.post(f"/api/v1/alerts/none/{action}").status_code == 404
    assert client.get("/api/v1/alerts", params={"state": "open"}).status_code == 422


# --- people's actions ---------------------------------------------------------------------------------------------------


def events(client: TestClient, **asked: str) -> list[str]:
    return [one["event"] for one in client.get("/api/v1/deliveries", params=asked).json()["deliveries"]]


def report(client: TestClient, at: float) -> None:
    services_of(client).outbox.chores[0](at)


def history(client: TestClient, ident: str) -> list[tuple[str, str, str]]:
    found = client.get(f"/api/v1/alerts/{ident}").json()["history"]
    return [(one["event"], one["who"], one["note"]) for one in found]


@pytest.mark.sql
def test_each_act_has_an_undo_and_leaves_a_trace(client: TestClient) -> None:
    ident = Agent(client).fails()["id"]

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


def test_act_is_under_the_name_of_the_key_or_its_login(client: TestClient) -> None:
    ident = Agent(client).fails()["id"]
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
    ident = Agent(client).fails()["id"]
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
    ident = Agent(client).fails()["id"]
    [told] = until(lambda: client.get("/api/v1/deliveries?state=delivered").json()["deliveries"])
    created = datetime.fromisoformat(told["created"]).timestamp()

    def messages(after_s: float) -> int:
        report(client, created + after_s)
        return len(events(client))

    assert [messages(599), messages(601), messages(601)] == [1, 2, 2]
    client.post(f"/api/v1/alerts/{ident}/ack")
    assert messages(1300) == 2


# --- runs that are deleted --------------------------------------------------------------------------------------------


def age(client: TestClient) -> None:
    """Forty days pass, in which another run is alive."""
    services = services_of(client)
    later = services.started + 40 * DAY_S
    services.database.write(lambda c: services.store.append_in(c, [frame({"loss": [2.0]}, run="alive")], later))  # type: ignore[attr-defined]
    Retention(
        services.database, services.store, RetentionPolicy(runs_days=30), clock=lambda: later, uptime=lambda: later,
        on_deleted=services.forget,
    ).run_once()  # fmt: skip


@pytest.mark.parametrize("how", ["by retention", "by hand", "after it was resolved"])
@pytest.mark.parametrize("arrives", [True, False], ids=["firing arrived", "firing is still tried"])
def test_an_alert_of_a_deleted_run_is_told_to_be_over(tmp_path: Path, arrives: bool, how: str) -> None:
    away, clock = [True], Clock(time.time())
    posts = Posts(lambda number: 200 if not away or (arrives and number == 1) else 503)
    with api(tmp_path, send=posts, clocks={"clock": clock}) as client:
        client.post("/api/v1/channels", json={"name": "hook", "url": posts.url}, headers=ADMIN).raise_for_status()
        send(client, frame({"loss": [2.0, float("nan")]}, run="sick"))
        [fired] = until(lambda: posts.of_type("alert.firing"), why="the alert is told")
        if how == "after it was resolved":
            [alert] = client.get("/api/v1/alerts").json()["alerts"]
            client.post(f"/api/v1/alerts/{alert['id']}/resolve").raise_for_status()
        if how == "by retention":
            age(client)
        else:
            assert client.delete("/api/v1/runs/sick", headers=ADMIN).status_code == 204
        assert client.get("/api/v1/runs/sick", headers=ADMIN).status_code == 404
        away.clear()
        clock.at += 60
        services_of(client).outbox.wake()
        until(lambda: "resolved" in posts.arrived, why="the receiver hears that it is over")
        over = posts.deliveries[-1].json
        assert (over["type"], over["data"]["alert"]["id"]) == ("alert.resolved", fired.json["data"]["alert"]["id"])
        assert posts.arrived == [*(["firing"] if arrives else []), "resolved"]
        if how != "after it was resolved":
            assert over["data"]["evidence"]["resolved"] == "the run was deleted"
        assert client.get("/api/v1/alerts", headers=ADMIN).json()["alerts"] == []
