"""Channels, alerts and verdicts over HTTP, with a real receiver and the whole server behind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from builders import Receiver, until
from data_folder import place_of
from fastapi.testclient import TestClient
from standardwebhooks import Webhook

from perfagent.wire import Event, Frame, Group, encode
from perfagent_server.app import create_app
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.settings import Settings

TOKEN = "t" * 32
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def api(tmp_path: Path, receiver: Receiver) -> Iterator[TestClient]:
    settings = Settings(**place_of(tmp_path), admin_token=TOKEN, webhook_allow=(receiver.address,))
    with TestClient(create_app(settings, dashboard=False), base_url="http://127.0.0.1:8420") as client:
        yield client


class Agent:
    """Sends frames of one rank as an agent does."""

    def __init__(self, api: TestClient, run: str = "r1", rank: int = 0) -> None:
        self.api, self.run, self.rank, self.seq = api, run, rank, 0

    def send(self, steps: range, *, state: str | None = None, **columns: list[float]) -> None:
        self.seq += 1
        times = [time.time()] * len(steps)
        values = {name.replace("__", "/"): values for name, values in columns.items()}
        groups = [Group(list(steps), times, times, values)] if len(steps) else []  # type: ignore[arg-type]
        events = [Event(kind="state", time=time.time(), data={"state": state, "world_size": 1})] if state else []
        made = Frame(
            project="p", run=self.run, name="gpt", source=f"{self.run}-{self.rank}", attempt=1, rank=self.rank, seq=self.seq,
            groups=groups, events=events,
        )  # fmt: skip
        answer = self.api.post(
            "/api/v1/ingest", content=encode(made), headers={"Content-Type": "application/x-msgpack"}
        )
        assert answer.status_code == 200, answer.text


def add(api: TestClient, url: str, **more: Any) -> dict[str, str]:
    answer = api.post("/api/v1/channels", json={"name": "hook", "kind": "webhook", "url": url, **more}, headers=ADMIN)
    assert answer.status_code == 201, answer.text
    made: dict[str, str] = answer.json()
    return made


def alerts(api: TestClient, **params: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = api.get("/api/v1/alerts", params=params).json()["alerts"]
    return found


def test_a_nan_reaches_the_receiver_signed_and_is_in_every_answer(api: TestClient, receiver: Receiver) -> None:
    made = add(api, receiver.url)
    agent = Agent(api)
    agent.send(range(1, 4), state="starting", loss=[3.0, 2.0, 1.0])
    agent.send(range(4, 6), loss=[math.nan, math.nan], grad__norm=[math.nan, math.nan])
    [got] = until(lambda: receiver.of_type("alert.firing"))
    Webhook(made["secret"]).verify(got.body, got.headers)
    data = got.json["data"]
    assert data["alert"]["rule"] == "nonfinite_loss"
    assert (data["run"], data["run_name"], data["project"]) == ("r1", "gpt", "p")
    assert data["url"] == "http://127.0.0.1:8420/run/r1"
    [alert] = alerts(api)
    assert alert["id"] == data["alert"]["id"]
    assert (alert["state"], alert["since_step"]) == ("firing", 4)
    verdict = api.get("/api/v1/runs/r1/verdict").json()
    assert verdict["rule"] == "nonfinite_loss"
    assert verdict["evidence"]["value"] == "NaN"
    findings = api.get("/api/v1/runs/r1/findings").json()["findings"]
    assert [found["rule"] for found in findings] == ["nonfinite_loss", "nonfinite_gradient"]
    assert api.get("/api/v1/runs/r1/alerts").json()["alerts"] == [alert]


def test_a_healthy_run_has_a_verdict_with_figures(api: TestClient) -> None:
    Agent(api).send(range(1, 41), loss=[3.0 - 0.01 * step for step in range(40)], step_time_s=[0.05] * 40)
    found = until(
        lambda: (
            "step 40" in api.get("/api/v1/runs/r1/verdict").json()["message"]
            and api.get("/api/v1/runs/r1/verdict").json()
        )
    )
    assert found["rule"] == "healthy"
    assert api.get("/api/v1/runs/r1/findings").json() == {"findings": []}


def test_alerts_are_filtered_acknowledged_muted_and_resolved(api: TestClient) -> None:
    Agent(api).send(range(1, 3), loss=[1.0, math.nan])
    [alert] = until(lambda: alerts(api, state="firing", severity="critical", run="r1"))
    assert alerts(api, state="resolved") == alerts(api, severity="info") == alerts(api, run="other") == []
    ident = alert["id"]
    assert api.post(f"/api/v1/alerts/{ident}/ack").json()["acknowledged"] is not None
    assert api.post(f"/api/v1/alerts/{ident}/mute").json()["muted_until"] is not None
    assert api.post(f"/api/v1/alerts/{ident}/mute", params={"for_s": 0}).json()["muted_until"] is None
    assert api.post(f"/api/v1/alerts/{ident}/resolve").json()["state"] == "resolved"
    assert api.post(f"/api/v1/alerts/{ident}/resolve").status_code == 200
    assert api.get("/api/v1/runs/r1/verdict").json()["rule"] == "nonfinite_loss", (
        "closing an alert does not heal the run"
    )


def test_seconds_of_a_mute_come_in_the_body_or_in_the_query(api: TestClient) -> None:
    Agent(api).send(range(1, 3), loss=[1.0, math.nan])
    [alert] = until(lambda: alerts(api, state="firing"))
    address = f"/api/v1/alerts/{alert['id']}/mute"

    def lasts_s(**asked: Any) -> float:
        until_when = api.post(address, **asked).json()["muted_until"]
        return datetime.fromisoformat(until_when).timestamp() - time.time()

    assert api.post(address).json()["muted_until"].startswith("9999-12-31"), "until somebody undoes it"
    assert lasts_s(json={"for_s": 600}) == pytest.approx(600, abs=30)
    assert lasts_s(params={"for_s": 900}) == pytest.approx(900, abs=30)
    assert api.post(address, json={"for_s": 0}).json()["muted_until"] is None
    for wrong in ({"json": {"for_s": -3}}, {"json": {"for_s": "long"}}, {"params": {"for_s": -3}}):
        answer = api.post(address, **wrong)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["error"]["field"]) == (422, "for_s")
    twice = api.post(address, json={"for_s": 5}, params={"for_s": 6})
    assert (twice.status_code, twice.json()["error"]["field"]) == (422, "for_s")
    assert alerts(api)[0]["muted_until"] is None


def test_an_alert_that_opens_again_does_not_say_that_it_is_resolved(api: TestClient) -> None:
    agent = Agent(api)
    agent.send(range(1, 3), loss=[1.0, math.nan])
    [alert] = until(lambda: alerts(api, state="firing"))
    closed = api.post(f"/api/v1/alerts/{alert['id']}/resolve").json()
    assert closed["evidence"]["resolved"] == "resolved by local"
    agent.send(range(3, 4), loss=[math.nan])
    [again] = until(lambda: alerts(api, state="firing"))
    assert again["id"] == alert["id"]
    assert (again["resolved"], again["evidence"]) == (None, alert["evidence"])
    told = api.get("/api/v1/runs/r1/verdict").json()["evidence"]
    assert {name: told[name] for name in alert["evidence"]} == alert["evidence"]


def test_alerts_that_say_what_a_run_is_worth_outlive_it_and_can_be_closed(api: TestClient) -> None:
    agent = Agent(api)
    agent.send(range(1, 3), state="starting", loss=[1.0, math.nan])
    [alert] = until(lambda: alerts(api, state="firing"))
    agent.send(range(0), state="finished")
    until(lambda: api.get("/api/v1/runs/r1").json()["state"] == "finished")
    assert [one["state"] for one in alerts(api)] == ["firing"]
    assert api.get("/api/v1/runs/r1/verdict").json()["rule"] == "nonfinite_loss"
    assert api.post(f"/api/v1/alerts/{alert['id']}/resolve").json()["state"] == "resolved"


def test_who_was_told_before_a_mute_is_told_that_it_is_over_and_nobody_else(
    api: TestClient, receiver: Receiver
) -> None:
    add(api, receiver.url)
    agent = Agent(api)
    agent.send(range(1, 3), loss=[1.0, math.nan])
    [alert] = until(lambda: alerts(api, state="firing"))
    until(lambda: receiver.of_type("alert.firing"))
    api.post(f"/api/v1/alerts/{alert['id']}/mute", params={"for_s": 600})
    assert api.post(f"/api/v1/alerts/{alert['id']}/resolve").json()["state"] == "resolved"
    until(lambda: receiver.of_type("alert.resolved"))
    agent.send(range(3, 4), loss=[math.nan])
    until(lambda: alerts(api, state="firing"))
    last = api.get("/api/v1/deliveries").json()["deliveries"][0]
    assert (last["event"], last["state"], last["tries"]) == ("alert.firing", "waiting", 0)
    assert len(receiver.deliveries) == 2


def test_the_end_of_a_mute_tells_what_began_in_it(api: TestClient, receiver: Receiver) -> None:
    add(api, receiver.url)
    agent = Agent(api)
    agent.send(range(1, 3), loss=[1.0, math.nan])
    [alert] = until(lambda: alerts(api, state="firing"))
    until(lambda: receiver.of_type("alert.firing"))
    api.post(f"/api/v1/alerts/{alert['id']}/mute", params={"for_s": 3600})
    agent.send(range(3, 60), loss=[1.0] * 57)
    until(lambda: alerts(api, state="resolved"))
    agent.send(range(60, 61), loss=[math.nan])
    until(lambda: alerts(api, state="firing"))
    assert len(receiver.of_type("alert.firing")) == 1
    api.post(f"/api/v1/alerts/{alert['id']}/mute", json={"for_s": 0})
    again = until(lambda: len(receiver.of_type("alert.firing")) == 2 and receiver.deliveries[-1])
    assert (again.json["data"]["alert"]["id"], again.json["data"]["alert"]["since_step"]) == (alert["id"], 60)


def test_a_nan_logged_as_json_reaches_the_receiver_under_the_name_of_its_run(
    api: TestClient, receiver: Receiver
) -> None:
    made = add(api, receiver.url)
    for loss in (1.0, "NaN"):
        assert api.post("/api/v1/log", json={"project": "lab", "run": "my net", "metrics": {"loss": loss}}).is_success
    [got] = until(lambda: receiver.of_type("alert.firing"))
    Webhook(made["secret"]).verify(got.body, got.headers)
    assert got.json.keys() == {"type", "timestamp", "data"}
    data = got.json["data"]
    assert data.keys() == {"alert", "run", "run_name", "project", "evidence", "fix", "url"}
    assert {"id", "rule", "severity", "message", "since", "ranks"} <= data["alert"].keys()
    assert (data["run_name"], data["project"], data["alert"]["rule"]) == ("my net", "lab", "nonfinite_loss")
    assert (data["alert"]["ranks"], data["evidence"]["last_losses"]) == ([0], [1.0])


def test_a_channel_is_made_shown_without_its_secret_tested_and_removed(api: TestClient, receiver: Receiver) -> None:
    made = add(api, receiver.url)
    assert made["secret"].startswith("whsec_")
    [shown] = api.get("/api/v1/channels", headers=ADMIN).json()["channels"]
    assert shown["id"] == made["id"]
    assert "secret" not in shown
    tried = api.post(f"/api/v1/channels/{made['id']}/test", headers=ADMIN).json()
    assert (tried["state"], tried["status"]) == ("delivered", 200)
    Webhook(made["secret"]).verify(receiver.deliveries[0].body, receiver.deliveries[0].headers)
    assert receiver.deliveries[0].json["type"] == "channel.test"
    assert [row["event"] for row in api.get("/api/v1/deliveries").json()["deliveries"]] == ["channel.test"]
    assert api.delete(f"/api/v1/channels/{made['id']}", headers=ADMIN).status_code == 204
    assert api.delete(f"/api/v1/channels/{made['id']}", headers=ADMIN).status_code == 404
    assert api.post(f"/api/v1/channels/{made['id']}/test", headers=ADMIN).status_code == 404


def test_a_test_that_fails_says_why_and_is_not_repeated(api: TestClient, receiver: Receiver) -> None:
    with Receiver(lambda _: 500) as broken:
        made = add(api, receiver.url)
        api.app.state.services.outbox.guard = type(api.app.state.services.outbox.guard)([broken.address])  # type: ignore[attr-defined]
        other = add(api, broken.url)
        tried = api.post(f"/api/v1/channels/{other['id']}/test", headers=ADMIN).json()
        assert (tried["state"], tried["status"], tried["tries"]) == ("failed", 500, 1)
        assert made["id"] != other["id"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({"url": "http://127.0.0.1:1/x"}, "address_not_allowed"), ({"url": "http://10.0.0.1/x"}, "address_not_allowed"),
        ({"url": "file:///etc/passwd"}, "invalid"), ({"url": "nonsense"}, "invalid"),
        ({"url": "https://8.8.8.8/", "kind": "mail"}, "invalid"),
        ({"url": "https://8.8.8.8/", "min_severity": "high"}, "invalid"),
        ({"url": "https://8.8.8.8/", "secret": "short"}, "invalid"),
        ({"url": "https://8.8.8.8/", "secret": " "}, "invalid"),
        ({}, "invalid"),
    ],
)  # fmt: skip
def test_a_channel_that_cannot_be_is_refused_with_a_sentence(api: TestClient, body: dict[str, str], code: str) -> None:
    answer = api.post("/api/v1/channels", json={"name": "x", **body}, headers=ADMIN)
    assert answer.status_code == 422
    assert answer.json()["error"]["code"] == code


@pytest.mark.parametrize("url", ["http://a..b/", "http://..", f"http://{'a' * 64}.com/", "http://\u200b/", "nonsense"])
def test_an_address_that_no_resolver_takes_is_refused_by_the_name_of_its_field(api: TestClient, url: str) -> None:
    answer = api.post("/api/v1/channels", json={"url": url}, headers=ADMIN)
    assert (answer.status_code, answer.json()["error"]["field"]) == (422, "url")


def test_channels_are_an_administrators_business(api: TestClient, receiver: Receiver) -> None:
    made = add(api, receiver.url)
    assert api.post("/api/v1/channels", json={"name": "x", "url": receiver.url}).status_code == 401
    assert api.get("/api/v1/channels").status_code == 401
    assert api.delete(f"/api/v1/channels/{made['id']}").status_code == 401
    assert api.post(f"/api/v1/channels/{made['id']}/test").status_code == 401


def test_a_secret_of_ones_own_is_kept(api: TestClient, receiver: Receiver) -> None:
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    assert add(api, receiver.url, secret=secret)["secret"] == secret


def test_unknown_runs_and_alerts_are_404(api: TestClient) -> None:
    for path in ("/runs/none/verdict", "/runs/none/findings", "/runs/none/alerts"):
        assert api.get(f"/api/v1{path}").status_code == 404
    for action in ("ack", "mute", "resolve"):
        assert api.post(f"/api/v1/alerts/none/{action}").status_code == 404
    assert api.get("/api/v1/alerts", params={"state": "open"}).status_code == 422


def test_every_rule_is_described_with_its_thresholds(api: TestClient) -> None:
    rules = {rule["rule"]: rule for rule in api.get("/api/v1/rules").json()["rules"]}
    assert set(rules) == {rule.id for rule in all_rules()}
    assert rules["low_gpu_utilization"]["thresholds"]["warning_below_pct"] == 30.0
    assert rules["low_gpu_utilization"]["units"]["warning_below_pct"] == "%"
    for rule in rules.values():
        assert rule["description"]
        for words in rule["words"].values():
            assert "{" not in words["fires"]
            assert words["remedies"][""]
        assert rule["words"]["en"]["remedies"].keys() == rule["words"]["zh"]["remedies"].keys()


def test_receivers_are_told_that_a_deleted_run_fires_no_longer(api: TestClient, receiver: Receiver) -> None:
    add(api, receiver.url)
    Agent(api).send(range(1, 3), loss=[1.0, math.nan])
    [fired] = until(lambda: receiver.of_type("alert.firing"))
    assert api.delete("/api/v1/runs/r1", headers=ADMIN).status_code == 204
    [over] = until(lambda: receiver.of_type("alert.resolved"))
    assert over.json["data"]["alert"]["id"] == fired.json["data"]["alert"]["id"]
    assert "deleted" in over.json["data"]["evidence"]["resolved"]


def test_what_waits_to_be_told_of_a_resolved_alert_outlives_its_run(tmp_path: Path) -> None:
    """The receiver is away when the alert is resolved; the run is deleted before it is back."""
    receiver, away = Receiver(lambda number: 503 if number > 1 and away else 200), [True]
    settings = Settings(**place_of(tmp_path), admin_token=TOKEN, webhook_allow=(receiver.address,))
    with TestClient(create_app(settings, dashboard=False), base_url="http://127.0.0.1:8420") as api:
        add(api, receiver.url)
        Agent(api).send(range(1, 3), loss=[1.0, math.nan])
        until(lambda: receiver.of_type("alert.firing"))
        [alert] = until(lambda: alerts(api, state="firing"))
        api.post(f"/api/v1/alerts/{alert['id']}/resolve")
        until(lambda: receiver.of_type("alert.resolved"))
        assert api.delete("/api/v1/runs/r1", headers=ADMIN).status_code == 204
        away.clear()
        until(lambda: any(one.status == 200 for one in receiver.of_type("alert.resolved")), within_s=30)
    receiver.close()
