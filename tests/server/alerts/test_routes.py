"""Channels, alerts and verdicts over HTTP, with the whole server behind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import Receiver, until
from fastapi.testclient import TestClient
from frames import state
from posting import Posts
from standardwebhooks import Webhook

from perfagent_server.rules.catalogue import all_rules


@pytest.fixture
def posts() -> Posts:
    return Posts()


@pytest.fixture
def client(tmp_path: Path, posts: Posts) -> Iterator[TestClient]:
    with api(tmp_path, send=posts) as client:
        yield client


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


def test_a_healthy_run_has_a_verdict_with_figures(client: TestClient, agent: Agent) -> None:
    agent.send(1, loss=[3.0 - 0.01 * step for step in range(40)], step_time_s=[0.05] * 40)
    verdict = until(
        lambda: (found := client.get("/api/v1/runs/r1/verdict").json()) and "step 40" in found["message"] and found
    )
    assert verdict["rule"] == "healthy"
    assert client.get("/api/v1/runs/r1/findings").json() == {"findings": []}


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
    evidence = client.get("/api/v1/runs/r1/verdict").json()["evidence"]
    assert {name: evidence[name] for name in alert["evidence"]} == alert["evidence"]


def test_an_alert_about_the_result_outlives_its_run_and_can_be_closed(client: TestClient, agent: Agent) -> None:
    alert = agent.fails()
    agent.send(3, how="finished")
    until(lambda: client.get("/api/v1/runs/r1").json()["state"] == "finished")
    assert [one["state"] for one in alerts(client)] == ["firing"]
    assert client.get("/api/v1/runs/r1/verdict").json()["rule"] == "nonfinite_loss"
    assert resolve(client, alert)["state"] == "resolved"


def test_who_was_told_before_a_mute_hears_its_end_and_nothing_more(
    client: TestClient, agent: Agent, posts: Posts
) -> None:
    add(client)
    alert = agent.fails()
    until(lambda: posts.arrived)
    client.post(f"/api/v1/alerts/{alert['id']}/mute", params={"for_s": 600})
    resolve(client, alert)
    until(lambda: posts.arrived == ["firing", "resolved"])
    agent.send(3, loss=[math.nan])
    until(lambda: alerts(client, state="firing"))
    last = client.get("/api/v1/deliveries").json()["deliveries"][0]
    assert (last["event"], last["state"], last["tries"]) == ("alert.firing", "waiting", 0)
    assert len(posts.deliveries) == 2


def test_the_end_of_a_mute_tells_what_began_in_it(client: TestClient, agent: Agent, posts: Posts) -> None:
    add(client)
    alert = agent.fails()
    until(lambda: posts.arrived)
    client.post(f"/api/v1/alerts/{alert['id']}/mute", params={"for_s": 3600})
    agent.send(3, loss=[1.0] * 57)
    until(lambda: alerts(client, state="resolved"))
    agent.send(60, loss=[math.nan])
    until(lambda: alerts(client, state="firing"))
    assert len(posts.of_type("alert.firing")) == 1
    client.post(f"/api/v1/alerts/{alert['id']}/mute", json={"for_s": 0})
    until(lambda: len(posts.of_type("alert.firing")) == 2)
    about = posts.deliveries[-1].json["data"]["alert"]
    assert (about["id"], about["since_step"]) == (alert["id"], 60)


def test_a_nan_logged_as_json_is_told_under_the_name_of_its_run(client: TestClient, posts: Posts) -> None:
    add(client)
    for loss in (1.0, "NaN"):
        row = {"project": "lab", "run": "my net", "metrics": {"loss": loss}}
        assert client.post("/api/v1/log", json=row).is_success
    [got] = until(lambda: posts.of_type("alert.firing"))
    assert got.json.keys() == {"type", "timestamp", "data"}
    data = got.json["data"]
    assert data.keys() == {"alert", "run", "run_name", "project", "evidence", "fix", "url"}
    assert {"id", "rule", "severity", "message", "since", "ranks"} <= data["alert"].keys()
    assert (data["run_name"], data["project"], data["alert"]["rule"]) == ("my net", "lab", "nonfinite_loss")
    assert (data["alert"]["ranks"], data["evidence"]["last_losses"]) == ([0], [1.0])


def test_a_channel_is_shown_without_its_secret_tested_and_removed(client: TestClient, posts: Posts) -> None:
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


def test_every_rule_is_described_with_its_thresholds(client: TestClient) -> None:
    rules = {rule["rule"]: rule for rule in client.get("/api/v1/rules").json()["rules"]}
    assert set(rules) == {rule.id for rule in all_rules()}
    assert rules["low_gpu_utilization"]["thresholds"]["warning_below_pct"] == 30.0
    assert rules["low_gpu_utilization"]["units"]["warning_below_pct"] == "%"
    for rule in rules.values():
        assert rule["description"]
        for words in rule["words"].values():
            assert "{" not in words["fires"]
            assert words["remedies"][""]
