"""What somebody who looked for holes found: silence that never ended, messages that came twice or never, repeats without
end."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from api_builders import ADMIN, frame, send, services_of
from builders import until
from clocks import Clock
from fastapi.testclient import TestClient
from posting import Posts
from sqlalchemy import update
from standardwebhooks import Webhook
from told import NAN, Told, heal

from perfagent.wire import Event, Finding
from perfagent_server.alerts import acts, channels, tables
from perfagent_server.alerts.batches import what_is_due
from perfagent_server.alerts.state_machine import Change
from perfagent_server.store.tables import channel, delivery

DAY_S = 86400.0
LINK = "http://here/{}".format


def apply(told: Told, kind: str, found: Finding, step: int = 1) -> None:
    change = Change(kind, "al", found, step, told.now)  # type: ignore[arg-type]
    told.write(lambda c: tables.apply(c, [("r", change)], told.now, LINK) and None)


def add(client: TestClient, **more: Any) -> dict[str, Any]:
    made = client.post("/api/v1/channels", json={"url": Posts.url, **more}, headers=ADMIN)
    assert made.status_code == 201, made.text
    return dict(made.json())


# ---- channels


def test_a_webhook_gets_each_alert_by_itself(client: TestClient) -> None:
    made = client.post("/api/v1/channels", json={"url": Posts.url, "group_s": 600}, headers=ADMIN)
    assert (made.status_code, "by itself" in made.json()["error"]["message"]) == (422, True)


def test_a_channel_that_was_off_hears_that_an_alert_is_over(told: Told) -> None:
    told.fail()
    [ident] = {row["channel"] for row in told.deliveries()}
    told.write(lambda c: channels.set_enabled(c, ident, enabled=False))
    heal(told, 3)
    told.write(lambda c: channels.set_enabled(c, ident, enabled=True))
    with told.database.read() as connection:
        due = what_is_due(connection, told.now + 1, {}).batches
    assert [row["event"] for batch in due for row in batch.rows] == ["alert.resolved"]


def test_every_secret_of_a_day_signs_and_the_newest_after_it(client: TestClient, posts: Posts, clock: Clock) -> None:
    made = add(client)
    path = f"/api/v1/channels/{made['id']}"
    secrets = [made["secret"], *(client.post(f"{path}/rotate", headers=ADMIN).json()["secret"] for _ in range(2))]
    assert len(set(secrets)) == 3
    client.post(f"{path}/test", headers=ADMIN)
    [got] = posts.of_type("channel.test")
    for secret in secrets:
        Webhook(secret).verify(got.body, got.headers)
    clock.at += 90_000
    client.post(f"{path}/test", headers=ADMIN)
    assert len(posts.of_type("channel.test")[-1].headers["webhook-signature"].split()) == 1


def test_a_token_without_a_digit_is_not_shown(client: TestClient) -> None:
    token = "AbCdEfGhIjKlMnOpQrStUvWx"
    add(client, url=f"{Posts.url}/hooks/{token}")
    shown = client.get("/api/v1/channels", headers=ADMIN).text
    assert token not in shown and "/hooks/AbCd..." in shown


# ---- reports


def test_a_digest_names_alerts_of_runs_that_fell_silent(client: TestClient, posts: Posts, clock: Clock) -> None:
    send(client, frame({"loss": [2.0, float("nan")]}), **ADMIN)
    until(lambda: client.get("/api/v1/alerts?state=firing").json()["alerts"])
    add(client, every_s=3600)
    clock.at += 2 * DAY_S  # nothing was heard of the run since
    services_of(client).outbox.wake()
    [got] = until(lambda: posts.of_type("digest"))
    assert "1 alert open" in got.json["data"]["alert"]["message"]
    assert "NaN" in got.json["data"]["alert"]["message"]


def test_a_new_channel_hears_nothing_of_runs_that_had_ended(client: TestClient) -> None:
    ended = Event(kind="state", time=time.time(), step=2, data={"state": "finished"})
    send(client, frame({"loss": [2.0, 1.0]}, events=[ended]), **ADMIN)
    add(client, summaries=True)
    services_of(client).outbox.chores[0](time.time() + 21)
    assert client.get("/api/v1/deliveries").json()["deliveries"] == []


# ---- repeats and quiet


def test_a_snooze_of_what_was_not_sent_yet_sends_it_once(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    told.write(update(delivery).values(due=told.now + 50, ready=told.now + 50))
    told.write(lambda c: acts.snooze(c, told.id(), told.now + 100, told.now, LINK) and None)
    assert told.events() == ["firing"]


def test_acknowledged_alert_is_not_told_when_its_snooze_ends(told: Told) -> None:
    told.fail()
    told.write(lambda c: acts.snooze(c, told.id(), told.now + 100, told.now, LINK) and None)
    assert len(told.deliveries()) == 2
    told.write(lambda c: acts.acknowledge(c, told.id(), told.now, who="ada") and None)
    assert len(told.deliveries()) == 1


def test_a_gathered_warning_that_becomes_critical_goes_at_once(told: Told) -> None:
    told.write(update(channel).values(kind="slack", group_s=600.0))
    found = Finding(rule="data_bound", severity="warning", message="slow", ranks=[0])
    apply(told, "fire", found)
    apply(told, "update", replace(found, severity="critical"), 2)
    [row] = told.deliveries()
    assert (bool(row["urgent"]), row["due"]) == (True, 0.0)
