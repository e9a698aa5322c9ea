"""Mutes, snoozes and silences: what channels are not told, until when, and what they are told afterwards."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import insert, update
from told import NAN, Told, heal

from perfagent.wire import Finding, Severity
from perfagent_server.alerts import acts, history, quiet, retries, tables, waits
from perfagent_server.alerts.batches import put_off, what_is_due
from perfagent_server.alerts.outcome import Outcome
from perfagent_server.alerts.quiet import UNTIL_UNDONE, Silence
from perfagent_server.alerts.state_machine import Change
from perfagent_server.store.tables import channel, delivery, run, silence

MONDAY = datetime(2026, 3, 2, 2, tzinfo=UTC).timestamp()
HOUR, DAY = 3600.0, 86400.0


def silenced(told: Told, *, lasts_s: float, starts_in_s: float = 0.0, **matches: str) -> None:
    starts = told.now + starts_in_s
    values = {"project": "", "tag": "", "run": "", "rule": "", "repeats": "", "created": told.now, **matches}
    told.write(insert(silence).values(id=f"si_{starts}", starts=starts, ends=starts + lasts_s, **values))


def sent_now(told: Told) -> list[str]:
    """The events that an outbox would send at this moment."""
    with told.database.read() as connection:
        due = what_is_due(connection, told.now, {})
    return [row["event"].removeprefix("alert.") for batch in due.batches for row in batch.rows]


def snooze(told: Told, lasts_s: float | None) -> None:
    until = UNTIL_UNDONE if lasts_s is None else told.now + lasts_s if lasts_s else None
    ident = told.id()
    told.database.write(lambda connection: acts.snooze(connection, ident, until, told.now, str) and None)


@pytest.mark.parametrize(
    ("repeats", "at", "until"),
    [
        ("weekly", -1, None), ("weekly", HOUR, 2 * HOUR), ("weekly", 3 * HOUR, None),
        ("weekly", 7 * DAY + HOUR, 7 * DAY + 2 * HOUR), ("daily", DAY + HOUR, DAY + 2 * HOUR), ("daily", DAY + 3 * HOUR, None),
    ],
)  # fmt: skip
def test_a_window_that_repeats_is_on_in_its_hours_only(repeats: str, at: float, until: float | None) -> None:
    window = Silence("s", "p", "", "", "", MONDAY, MONDAY + 2 * HOUR, repeats)
    assert window.until(MONDAY + at) == (None if until is None else MONDAY + until)


@pytest.mark.parametrize(
    ("matches", "is_quiet"),
    [
        ({"project": "p"}, True), ({"project": "q"}, False), ({"run": "r"}, True), ({"run": "gpt"}, True),
        ({"run": "other"}, False), ({"rule": "nonfinite_loss"}, True), ({"rule": "hang"}, False), ({"tag": "night"}, True),
        ({"tag": "day"}, False), ({"project": "p", "rule": "hang"}, False), ({"project": "p", "tag": "night"}, True),
    ],
)  # fmt: skip
def test_a_silence_keeps_quiet_what_it_matches(told: Told, matches: dict[str, str], is_quiet: bool) -> None:
    told.write(update(run).values(tags='["night"]'))
    silenced(told, lasts_s=HOUR, **matches)
    told.judge([1, 2], loss=[2.0, NAN])
    assert told.due() == [("firing", HOUR - 1 if is_quiet else 0.0)]
    assert sent_now(told) == ([] if is_quiet else ["firing"])


def test_silences_that_follow_each_other_end_with_the_last(told: Told) -> None:
    silenced(told, lasts_s=HOUR, project="p")
    silenced(told, starts_in_s=HOUR, lasts_s=HOUR, project="p")
    told.judge([1, 2], loss=[2.0, NAN])
    assert told.due() == [("firing", 2 * HOUR - 1)]
    heal(told, 3)
    assert told.due() == [], "what is healed in a silence is never told"


def test_a_window_that_begins_meanwhile_puts_a_delivery_off(told: Told) -> None:
    told.fail()
    heal(told, 3)
    told.arrive()
    told.judge([63], loss=[NAN])  # told again after ten minutes, if it lasts
    silenced(told, starts_in_s=30, lasts_s=HOUR, project="p")
    told.now += 600
    with told.database.read() as connection:
        due = what_is_due(connection, told.now, {})
    assert [row["due"] for row in due.later.values()] == [pytest.approx(told.now - 570 + HOUR)]
    assert due.batches == []


@pytest.mark.sql
@pytest.mark.parametrize("is_healed", [False, True])
def test_a_snoozed_alert_is_told_again_at_the_end_if_it_fires(told: Told, is_healed: bool) -> None:
    told.fail()
    snooze(told, HOUR)
    assert told.due() == [("firing", 0.0), ("firing", HOUR)]
    if is_healed:
        heal(told, 3)
    told.now += HOUR
    assert sent_now(told) == ["resolved" if is_healed else "firing"]


def test_snooze_is_undone_or_ends_with_its_alert(told: Told) -> None:
    told.fail()
    for lasts_s in (HOUR, 0):
        snooze(told, lasts_s)
    assert told.events() == ["firing"]
    snooze(told, None)
    assert told.events() == ["firing"], "there is no end to be told at"
    heal(told, 3)
    told.judge([63], loss=[NAN])
    told.now += 61
    assert sent_now(told) == ["resolved"], "what fires again waits for that"
    told.arrive()
    assert told.events() == ["firing", "resolved", "firing"]


def test_a_mute_is_of_the_rule_and_has_an_undo(told: Told) -> None:
    told.fail()
    told.mute(told.id(), UNTIL_UNDONE - told.now)
    heal(told, 3)
    told.arrive()
    told.judge([9000], loss=[NAN], after_s=1800.0)
    assert sent_now(told) == []
    told.mute(told.deliveries()[-1]["alert"], None)
    assert sent_now(told) == ["firing"]


def history_of(told: Told, alert: str, *events: str) -> list[dict[str, Any]]:
    with told.database.read() as connection:
        found = history.history_of(connection, alert)
    return [one for one in found if one["event"] in events or not events]


def raise_alert(told: Told, name: str, severity: Severity, kind: str = "fire", step: int = 1) -> None:
    found = Finding(rule=name, severity=severity, message=f"{name} is wrong")
    change = Change(kind, name, found, step, told.now)  # type: ignore[arg-type]
    told.database.write(lambda connection: tables.apply(connection, [("r", change)], told.now, str))


def test_each_change_of_severity_is_in_the_history(told: Told) -> None:
    raise_alert(told, "cpu", "critical")
    times = []
    severities: tuple[Severity, ...] = ("info", "critical", "critical", "info", "critical")
    for step, severity in enumerate(severities, 2):
        told.now += 60
        times.append(told.now)
        for _ in range(2):  # the same data judged again after a kill adds nothing
            raise_alert(told, "cpu", severity, "update", step)
    told.now += 60
    raise_alert(told, "cpu", "critical", "resolve")
    raise_alert(told, "cpu", "info", "reopen", 99)
    found = history_of(told, "cpu", "worse", "better")
    assert [one["event"] for one in found] == ["better", "worse", "better", "worse", "better"]
    assert [datetime.fromisoformat(one["time"]).timestamp() for one in found[:4]] == [*times[:2], *times[3:]]
    assert all({"info", "critical"} < {*one["note"].replace(":", "").split()} for one in found)
    assert all("cpu is wrong" in one["note"] for one in found)


@pytest.mark.sql
def test_an_alert_that_flips_for_hours_keeps_its_newest_changes(told: Told) -> None:
    raise_alert(told, "cpu", "info")
    for step in range(2, 302):
        told.now += 60
        raise_alert(told, "cpu", "info" if step % 2 else "critical", "update", step)
    found = history_of(told, "cpu")
    assert len(found) < 100
    assert found[0]["event"] == "fired", "what is no change of severity stays"
    assert datetime.fromisoformat(found[-1]["time"]).timestamp() == told.now


def messages(told: Told) -> list[set[str]]:
    """The alerts in each message that would go out now. What is put off is put off for good."""
    with told.database.read() as connection:
        due = what_is_due(connection, told.now, {})
    told.database.write(lambda connection: put_off(connection, due.later))
    return [{row["alert"] for row in batch.rows} for batch in due.batches]


@pytest.mark.sql
def test_warnings_of_a_run_come_together_critical_ones_at_once(told: Told) -> None:
    told.write(update(channel).values(kind="slack", group_s=600.0))
    raise_alert(told, "data_bound", "warning")
    raise_alert(told, "sync_bound", "warning")
    assert sent_now(told) == [], "troubles seldom come alone"
    told.now += waits.GATHERED_S
    assert messages(told) == [{"data_bound", "sync_bound"}]
    with told.database.read() as connection:
        [batch] = what_is_due(connection, told.now, {}).batches
    failed = Outcome(503, "not now")
    told.database.write(lambda connection: retries.write_down(connection, batch.rows, failed, told.now, lambda _: None))
    assert len({row["due"] for row in told.deliveries()}) == 1
    told.now += 2.0
    assert messages(told) == [{"data_bound", "sync_bound"}], "they are tried again together"
    told.arrive()
    first = told.now
    raise_alert(told, "eval_bound", "warning")
    told.now += 60
    raise_alert(told, "hang", "critical")
    assert messages(told) == [{"hang"}]
    told.arrive(delivery.c.alert == "hang")
    raise_alert(told, "data_bound", "warning", "resolve")
    told.now = first + 60 + 599
    assert messages(told) == []
    told.now += 1
    assert messages(told) == [{"data_bound", "eval_bound"}]


@pytest.mark.parametrize("values", [{"projects": '["q"]'}, {"tags": '["x"]'}])
def test_a_channel_for_one_project_or_tag_is_told_of_no_other(told: Told, values: dict[str, str]) -> None:
    told.write(update(channel).values(**values))
    told.judge([1, 2], loss=[2.0, math.nan])
    assert told.due() == []


def test_until_is_the_latest_of_mute_snooze_and_silence(told: Told) -> None:
    silenced(told, lasts_s=HOUR, project="p")
    told.judge([1, 2], loss=[2.0, NAN])
    told.mute(told.id(), 2 * HOUR)
    snooze(told, 3 * HOUR)
    with told.database.read() as connection:
        assert quiet.Quiet(connection, told.now).until([told.id()]) == {told.id(): told.now + 3 * HOUR}
