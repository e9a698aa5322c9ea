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
from sqlalchemy import insert, select, update
from standardwebhooks import Webhook
from told import NAN, Told, heal

from perfagent.wire import Event, Finding
from perfagent_server.alerts import acts, channels, reminders, tables
from perfagent_server.alerts.batches import what_is_due
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.alerts.retries import DISABLE_AFTER_S, write_down
from perfagent_server.alerts.state_machine import Change
from perfagent_server.store.tables import alert, channel, delivery, run, silence

DAY_S = 86400.0
LINK = "http://here/{}".format


def apply(told: Told, kind: str, found: Finding, step: int = 1) -> None:
    change = Change(kind, "al", found, step, told.now)  # type: ignore[arg-type]
    told.write(lambda c: tables.apply(c, [("r", change)], told.now, LINK) and None)


def repeats(told: Told) -> int:
    """How many messages would be sent once more."""
    told.write(update(channel).values(repeat_s=600.0))
    with told.database.read() as connection:
        return len(reminders.due_again(connection, told.now))


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


def test_old_failure_does_not_disable_a_channel_of_few_messages(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    [row] = told.deliveries()
    told.write(update(channel).values(failing_since=told.now - 6 * DISABLE_AFTER_S))
    told.write(lambda c: write_down(c, [row], Outcome(None, "timed out"), told.now, lambda _: None))
    with told.database.read() as connection:
        [shown] = channels.all_channels(connection)
    assert shown["enabled"]


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


def test_repeats_wait_for_the_first_message_and_end_with_the_run(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    told.now += 700
    assert repeats(told) == 0, "the first message has not arrived yet"
    told.arrive()
    assert repeats(told) == 1
    quiet = insert(silence).values(id="s", project="p", starts=told.now - 1, ends=told.now + DAY_S, created=told.now)
    told.write(quiet)
    assert repeats(told) == 0
    told.write(silence.delete())
    told.write(update(channel).values(projects='["other"]'))
    assert repeats(told) == 0
    told.write(update(channel).values(projects="[]"))
    assert repeats(told) == 1
    told.write(update(run).values(ended=told.now))
    assert repeats(told) == 0


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


def test_a_mute_stays_on_the_rule_it_was_made_for(told: Told) -> None:
    found = Finding(rule="nonfinite_gradient", severity="warning", message="gradient", ranks=[0])
    apply(told, "fire", found)
    told.write(lambda c: acts.mute(c, "al", told.now + DAY_S, told.now))
    apply(told, "update", replace(found, rule="nonfinite_loss", severity="critical", message="loss"))
    with told.database.read() as connection:
        due = what_is_due(connection, told.now + 1, {})
        row = connection.execute(select(alert)).mappings().one()
    assert [one["event"] for batch in due.batches for one in batch.rows] == ["alert.firing"]
    assert tables.alert_of(row).muted_until is None


def test_alert_open_for_months_is_told_when_it_is_over(told: Told) -> None:
    told.fail()
    told.now += 60 * DAY_S
    Outbox(told.database, clock=lambda: told.now, send=Posts()).send_due()  # cleans up what is old, too
    heal(told, 3)
    assert told.events() == ["firing", "resolved"]


def test_closing_an_alert_open_twice_is_told_twice(told: Told) -> None:
    """Though no rule holds it any more."""
    told.fail()
    heal(told, 3)
    told.arrive()
    told.judge([100, 101], loss=[2.0, NAN])
    told.now += 3600
    told.arrive()
    told.write(lambda c: tables.resolve_by_hand(c, told.id(), told.now, LINK, "resolved by ada") and None)
    assert told.events() == ["firing", "resolved"] * 2


def test_alerts_of_a_script_can_be_silenced_by_their_rule(client: TestClient) -> None:
    made = client.post("/api/v1/silences", json={"rule": "user_alert", "for_s": 60})
    assert made.status_code == 201, made.text
