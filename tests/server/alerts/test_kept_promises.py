"""What somebody who looked for holes found: silence that never ended, messages that came twice or never, repeats without
end. One test each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from api_builders import ADMIN, api, frame, send
from builders import Receiver, until
from fastapi.testclient import TestClient
from sqlalchemy import insert, select, update
from told import NAN, Told, heal

from perfagent.wire import Event, Finding
from perfagent_server.alerts import acts, channels, reminders, tables
from perfagent_server.alerts.batches import what_is_due
from perfagent_server.alerts.outbox import Outbox, _clean
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.alerts.retries import DISABLE_AFTER_S, write_down
from perfagent_server.alerts.state_machine import Change
from perfagent_server.store.tables import alert, channel, delivery, run, silence

DAY_S = 86400.0


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.database.close()


@pytest.fixture
def client(tmp_path: Path, receiver: Receiver) -> Iterator[TestClient]:
    with api(tmp_path, webhook_allow=(receiver.address,)) as made:
        yield made


def write(told: Told, job: Any) -> Any:
    return told.database.write(job)


def arrived(told: Told) -> None:
    """Everything that was due arrived."""
    its = delivery.c.state == "waiting", delivery.c.due <= told.now
    write(
        told,
        lambda c: (
            c.execute(update(delivery).where(*its).values(state="delivered", tries=1, delivered=told.now)) and None
        ),
    )


def repeats(told: Told, every_s: float = 600.0) -> list[reminders.Again]:
    write(told, lambda c: c.execute(update(channel).values(repeat_s=every_s)) and None)
    with told.database.read() as connection:
        return reminders.due_again(connection, told.now)


def repeat(told: Told) -> None:
    found = repeats(told)
    write(told, lambda c: reminders.repeat(c, found, told.now, "http://here/{}".format))


# ---- channels


def test_a_webhook_gets_each_alert_by_itself_and_cannot_be_told_to_group(
    client: TestClient, receiver: Receiver
) -> None:
    made = client.post("/api/v1/channels", json={"url": receiver.url, "group_s": 600}, headers=ADMIN)
    assert made.status_code == 422
    assert "by itself" in made.json()["error"]["message"]


def test_a_channel_that_was_switched_off_hears_that_an_alert_is_over(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    arrived(told)
    [ident] = {row["channel"] for row in told.deliveries()}
    write(told, lambda c: channels.set_enabled(c, ident, enabled=False))
    heal(told, 3)
    write(told, lambda c: channels.set_enabled(c, ident, enabled=True))
    with told.database.read() as connection:
        due = what_is_due(connection, told.now + 1, {}).batches
    assert [row["event"] for batch in due for row in batch.rows] == ["alert.resolved"]


def test_an_old_failure_does_not_disable_a_channel_that_nothing_was_sent_to(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    [row] = told.deliveries()
    write(told, lambda c: c.execute(update(channel).values(failing_since=told.now - 30 * DAY_S)) and None)
    write(told, lambda c: write_down(c, [row], Outcome(None, "timed out"), told.now, lambda _: None))
    with told.database.read() as connection:
        [shown] = channels.all_channels(connection)
    assert shown["enabled"]
    assert DISABLE_AFTER_S == 5 * DAY_S


def test_every_secret_of_a_day_signs(client: TestClient, receiver: Receiver) -> None:
    from standardwebhooks import Webhook

    made = client.post("/api/v1/channels", json={"url": receiver.url}, headers=ADMIN).json()
    path = f"/api/v1/channels/{made['id']}"
    secrets = [made["secret"], *(client.post(f"{path}/rotate", headers=ADMIN).json()["secret"] for _ in range(2))]
    client.post(f"{path}/test", headers=ADMIN)
    [got] = until(lambda: receiver.of_type("channel.test"))
    for secret in secrets:
        Webhook(secret).verify(got.body, got.headers)


def test_a_token_without_a_digit_is_not_shown(client: TestClient, receiver: Receiver) -> None:
    token = "AbCdEfGhIjKlMnOpQrStUvWx"
    client.post("/api/v1/channels", json={"url": f"{receiver.url}/hooks/{token}"}, headers=ADMIN)
    shown = client.get("/api/v1/channels", headers=ADMIN).text
    assert token not in shown and "/hooks/AbCd..." in shown


# ---- reports


def test_a_report_that_fails_keeps_no_alert_back(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    sent: list[str] = []

    class Sends(Outbox):
        def _launch(self, batch: Any) -> None:
            sent.extend(row["id"] for row in batch.rows)

    def fails(_now: float) -> None:
        raise OSError("the disk is full")

    outbox = Sends(told.database, clock=lambda: told.now)
    outbox.chores.append(fails)
    outbox._schedule()
    assert len(sent) == 1
    assert outbox.counters["failures"] == 1


def test_a_digest_names_alerts_of_runs_that_fell_silent(client: TestClient, receiver: Receiver) -> None:
    send(client, frame({"loss": [2.0, float("nan")]}), **ADMIN)
    until(lambda: client.get("/api/v1/alerts?state=firing").json()["alerts"])
    client.post("/api/v1/channels", json={"url": receiver.url, "every_s": 3600}, headers=ADMIN)
    services = client.app.state.services  # type: ignore[attr-defined]
    later = time.time() + 2 * DAY_S  # nothing was heard of the run since
    services.outbox.chores[0].__self__.write(later)
    services.outbox._clock = lambda: later + 60
    services.outbox.wake()
    [got] = until(lambda: receiver.of_type("digest"))
    assert "1 alert open" in got.json["data"]["alert"]["message"]
    assert "NaN" in got.json["data"]["alert"]["message"]


def test_a_new_channel_hears_nothing_of_runs_that_ended_before_it_was_there(
    client: TestClient, receiver: Receiver
) -> None:
    ended = Event(kind="state", time=time.time(), step=2, data={"state": "finished"})
    send(client, frame({"loss": [2.0, 1.0]}, events=[ended]), **ADMIN)
    time.sleep(0.05)
    client.post("/api/v1/channels", json={"url": receiver.url, "summaries": True}, headers=ADMIN)
    services = client.app.state.services  # type: ignore[attr-defined]
    services.outbox.chores[0].__self__.write(time.time() + 21)
    assert client.get("/api/v1/deliveries").json()["deliveries"] == []


# ---- repeats and quiet


def test_repeats_do_not_pile_up_while_a_message_waits_or_an_alert_is_quiet(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    told.now += 700
    assert repeats(told) == [], "the first message has not arrived yet"
    arrived(told)
    assert len(repeats(told)) == 1
    values = {
        "id": "s", "project": "p", "tag": "", "run": "", "rule": "", "starts": told.now - 1, "ends": told.now + DAY_S,
        "repeats": "", "note": "", "who": "", "created": told.now,
    }  # fmt: skip
    write(told, lambda c: c.execute(insert(silence).values(**values)) and None)
    assert repeats(told) == []


def test_repeats_end_with_the_run_and_with_the_channels_interest(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    arrived(told)
    told.now += 700
    write(told, lambda c: c.execute(update(channel).values(projects='["other"]')) and None)
    assert repeats(told) == []
    write(told, lambda c: c.execute(update(channel).values(projects="[]")) and None)
    assert len(repeats(told)) == 1
    write(told, lambda c: c.execute(update(run).values(ended=told.now)) and None)
    assert repeats(told) == []


def test_a_snooze_of_what_was_not_sent_yet_sends_it_once(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    write(told, lambda c: c.execute(update(delivery).values(due=told.now + 50, ready=told.now + 50)) and None)
    write(told, lambda c: acts.snooze(c, told.id(), told.now + 100, told.now, "http://here/{}".format))
    assert [event for event, _ in told.due()] == ["firing"]


def test_an_acknowledged_alert_is_not_told_again_at_the_end_of_its_snooze(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    arrived(told)
    write(told, lambda c: acts.snooze(c, told.id(), told.now + 100, told.now, "http://here/{}".format))
    assert len(told.deliveries()) == 2
    write(told, lambda c: acts.acknowledge(c, told.id(), told.now, who="ada"))
    assert len(told.deliveries()) == 1


def test_a_warning_that_becomes_critical_while_it_is_gathered_goes_at_once(told: Told) -> None:
    write(told, lambda c: c.execute(update(channel).values(kind="slack", group_s=600.0)) and None)
    found = Finding(rule="data_bound", severity="warning", message="slow", ranks=[0])
    changes = [
        Change("fire", "al", found, 1, told.now),
        Change("update", "al", replace(found, severity="critical"), 2, told.now),
    ]
    for change in changes:
        write(
            told, lambda c, change=change: tables.apply(c, [("r", change)], told.now, "http://here/{}".format) and None
        )
    [row] = told.deliveries()
    assert (bool(row["urgent"]), row["due"]) == (True, 0.0)


def test_a_mute_stays_on_the_rule_it_was_made_for(told: Told) -> None:
    found = Finding(rule="nonfinite_gradient", severity="warning", message="gradient", ranks=[0])
    write(
        told,
        lambda c: tables.apply(c, [("r", Change("fire", "al", found, 1, told.now))], told.now, "{}".format) and None,
    )
    write(told, lambda c: acts.mute(c, "al", told.now + DAY_S, told.now))
    worse = replace(found, rule="nonfinite_loss", severity="critical", message="loss")
    write(
        told,
        lambda c: tables.apply(c, [("r", Change("update", "al", worse, 1, told.now))], told.now, "{}".format) and None,
    )
    with told.database.read() as connection:
        due = what_is_due(connection, told.now + 1, {})
        row = connection.execute(select(alert)).mappings().one()
    assert [one["event"] for batch in due.batches for one in batch.rows] == ["alert.firing"]
    assert tables.alert_of(row).muted_until is None


def test_an_alert_that_was_open_for_months_is_told_when_it_is_over(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    arrived(told)
    told.now += 60 * DAY_S
    write(told, lambda c: _clean(c, told.now - 30 * DAY_S))
    heal(told, 3)
    assert [event for event, _ in told.due()] == ["firing", "resolved"]


def test_an_alert_that_no_rule_holds_is_told_as_resolved_when_somebody_closes_it(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    arrived(told)
    write(
        told, lambda c: tables.resolve_by_hand(c, told.id(), told.now + 1, "http://here/{}".format, "resolved by ada")
    )
    assert [row["event"] for row in told.deliveries()] == ["alert.firing", "alert.resolved"]


def test_who_closes_an_alert_that_was_open_twice_has_it_told_twice(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    arrived(told)
    heal(told, 3)
    arrived(told)
    told.judge([100, 101], loss=[2.0, NAN])
    told.now += 3600
    arrived(told)
    write(told, lambda c: tables.resolve_by_hand(c, told.id(), told.now, "http://here/{}".format, "resolved by ada"))
    assert [row["event"] for row in told.deliveries()] == ["alert.firing", "alert.resolved"] * 2


def test_alerts_of_a_script_can_be_silenced_by_their_rule(client: TestClient) -> None:
    made = client.post("/api/v1/silences", json={"rule": "user_alert", "for_s": 60})
    assert made.status_code == 201, made.text
