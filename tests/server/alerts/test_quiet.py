"""Mutes, snoozes and silences: what channels are not told, until when, and what they are told afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

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
HOUR = 3600.0


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    made = Told(tmp_path)
    yield made
    made.database.close()


def silenced(told: Told, *, lasts_s: float, starts_in_s: float = 0.0, repeats: str = "", **matches: str) -> str:
    starts = told.now + starts_in_s
    ident = f"si_{starts}_{lasts_s}"
    any_of_them = {"project": "", "tag": "", "run": "", "rule": "", **matches}
    values = {
        "id": ident,
        **any_of_them,
        "starts": starts,
        "ends": starts + lasts_s,
        "repeats": repeats,
        "created": told.now,
    }
    told.database.write(lambda connection: connection.execute(insert(silence).values(**values)) and None)
    return ident


def sent_now(told: Told) -> list[str]:
    """The events that an outbox would send at this moment."""
    with told.database.read() as connection:
        due = what_is_due(connection, told.now, {})
    return [row["event"].removeprefix("alert.") for batch in due.batches for row in batch.rows]


def snooze(told: Told, lasts_s: float | None) -> None:
    until = UNTIL_UNDONE if lasts_s is None else told.now + lasts_s if lasts_s else None
    ident = told.id()
    told.database.write(lambda connection: acts.snooze(connection, ident, until, told.now, str) and None)


def delivered(told: Told) -> None:
    """Whatever is due has arrived."""
    told.database.write(
        lambda connection: (
            connection.exec_driver_sql(
                f"UPDATE delivery SET state = 'delivered', tries = 1, delivered = {told.now} WHERE due <= {told.now}"
            )
            and None
        )
    )


def test_a_window_that_repeats_is_on_in_its_hours_only() -> None:
    weekly = Silence("s", "p", "", "", "", MONDAY, MONDAY + 2 * HOUR, "weekly")
    assert weekly.until(MONDAY - 1) is None
    assert weekly.until(MONDAY + HOUR) == MONDAY + 2 * HOUR
    assert weekly.until(MONDAY + 3 * HOUR) is None
    assert weekly.until(MONDAY + 7 * 86400 + HOUR) == MONDAY + 7 * 86400 + 2 * HOUR
    daily = Silence("s", "p", "", "", "", MONDAY, MONDAY + 2 * HOUR, "daily")
    assert daily.until(MONDAY + 86400 + HOUR) == MONDAY + 86400 + 2 * HOUR
    assert daily.until(MONDAY + 86400 + 3 * HOUR) is None


@pytest.mark.parametrize(
    ("matches", "is_quiet"),
    [
        ({"project": "p"}, True), ({"project": "q"}, False), ({"run": "r"}, True), ({"run": "gpt"}, True),
        ({"run": "other"}, False), ({"rule": "nonfinite_loss"}, True), ({"rule": "hang"}, False), ({"tag": "night"}, True),
        ({"tag": "day"}, False), ({"project": "p", "rule": "hang"}, False), ({"project": "p", "tag": "night"}, True),
    ],
)  # fmt: skip
def test_a_silence_keeps_quiet_what_it_matches(told: Told, matches: dict[str, str], is_quiet: bool) -> None:
    told.database.write(lambda connection: connection.execute(update(run).values(tags='["night"]')) and None)
    silenced(told, lasts_s=HOUR, **matches)
    told.judge([1, 2], loss=[2.0, NAN])
    assert told.due() == [("firing", HOUR - 1 if is_quiet else 0.0)]
    assert sent_now(told) == ([] if is_quiet else ["firing"])


def test_what_still_fires_at_the_end_of_silences_that_follow_each_other_is_told_then(told: Told) -> None:
    silenced(told, lasts_s=HOUR, project="p")
    silenced(told, starts_in_s=HOUR, lasts_s=HOUR, project="p")
    told.judge([1, 2], loss=[2.0, NAN])
    assert told.due() == [("firing", 2 * HOUR - 1)]


def test_a_window_that_begins_before_the_time_has_come_puts_a_delivery_off(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    delivered(told)
    heal(told, 3)
    delivered(told)
    told.judge([63], loss=[NAN])  # told again after ten minutes, if it lasts
    silenced(told, starts_in_s=30, lasts_s=HOUR, project="p")
    told.now += 600
    with told.database.read() as connection:
        due = what_is_due(connection, told.now, {})
    assert [row["due"] for row in due.later.values()] == [pytest.approx(told.now - 570 + HOUR)]
    assert due.batches == []


def test_what_is_healed_in_a_silence_is_never_told(told: Told) -> None:
    silenced(told, lasts_s=HOUR, project="p")
    told.judge([1, 2], loss=[2.0, NAN])
    heal(told, 3)
    assert told.due() == []


@pytest.mark.sql
def test_an_alert_that_is_snoozed_is_told_again_at_the_end_if_it_still_fires(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    delivered(told)
    snooze(told, HOUR)
    assert told.due() == [("firing", 0.0), ("firing", HOUR)]
    told.now += HOUR
    assert sent_now(told) == ["firing"]


def test_an_alert_that_is_healed_while_snoozed_says_only_that(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    delivered(told)
    snooze(told, HOUR)
    heal(told, 3)
    assert [event for event, _ in told.due()] == ["firing", "resolved"]


def test_a_snooze_is_undone_and_one_without_an_end_ends_with_the_alert(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    delivered(told)
    snooze(told, HOUR)
    snooze(told, 0)
    assert [event for event, _ in told.due()] == ["firing"]
    snooze(told, None)
    assert [event for event, _ in told.due()] == ["firing"], "there is no end to be told at"
    heal(told, 3)
    told.judge([63], loss=[NAN])
    told.now += 61
    assert sent_now(told) == ["resolved"], "what fires again waits for that"
    delivered(told)
    assert [event for event, _ in told.due()] == ["firing", "resolved", "firing"]


def test_a_mute_is_of_the_rule_and_has_an_undo(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    delivered(told)
    told.mute(told.id(), UNTIL_UNDONE - told.now)
    heal(told, 3)
    delivered(told)
    told.judge([9000], loss=[NAN], after_s=1800.0)
    assert sent_now(told) == []
    told.mute(told.deliveries()[-1]["alert"], None)
    assert sent_now(told) == ["firing"]


def test_everything_that_happened_to_an_alert_is_kept_in_its_order(told: Told) -> None:
    told.judge([1, 2], loss=[2.0, NAN])
    ident = told.id()

    def people(connection: object) -> None:
        acts.acknowledge(connection, ident, told.now, who="ada", note="looking")  # type: ignore[arg-type]
        acts.mute(connection, ident, UNTIL_UNDONE, told.now, who="ada")  # type: ignore[arg-type]
        acts.mute(connection, ident, None, told.now + 1, who="bob")  # type: ignore[arg-type]
        acts.unacknowledge(connection, ident, told.now + 2, who="bob")  # type: ignore[arg-type]

    told.now += 1
    told.database.write(people)
    told.now += 2
    heal(told, 3)
    told.judge([63], loss=[NAN])
    with told.database.read() as connection:
        found = history.history_of(connection, ident)
    assert [one["event"] for one in found][:3] in (
        ["fired", "acknowledged", "muted"],
        ["fired", "muted", "acknowledged"],
    )
    assert [one["event"] for one in found][3:] == ["unmuted", "unacknowledged", "resolved", "reopened"]
    assert {(one["event"], one["who"], one["note"]) for one in found if one["who"]} == {
        ("acknowledged", "ada", "looking"), ("muted", "ada", ""), ("unmuted", "bob", ""), ("unacknowledged", "bob", ""),
    }  # fmt: skip


def raise_alert(
    told: Told, name: str, severity: Severity, kind: Literal["fire", "update", "reopen", "resolve"] = "fire", step: int = 1
) -> None:  # fmt: skip
    change = Change(kind, name, Finding(rule=name, severity=severity, message=f"{name} is wrong"), step, told.now)
    told.database.write(lambda connection: tables.apply(connection, [("r", change)], told.now, str))


def changes_of_severity(told: Told, name: str) -> list[tuple[str, str, str]]:
    with told.database.read() as connection:
        found = history.history_of(connection, name)
    return [(one["time"], one["event"], one["note"]) for one in found if one["event"] in ("worse", "better")]


def test_each_change_of_severity_is_in_the_history(told: Told) -> None:
    raise_alert(told, "cpu", "critical")
    times = []
    for step, severity in enumerate(("info", "critical", "critical", "info", "critical"), 2):
        told.now += 60
        times.append(told.now)
        for _ in range(2):  # the same data judged again after a kill adds nothing
            raise_alert(told, "cpu", severity, "update", step)  # type: ignore[arg-type]
    found = changes_of_severity(told, "cpu")
    assert [event for _, event, _ in found] == ["better", "worse", "better", "worse"]
    assert [datetime.fromisoformat(at).timestamp() for at, _, _ in found] == [*times[:2], *times[3:]]
    assert all({"info", "critical"} < {*words.replace(":", "").split()} for _, _, words in found)
    assert all("cpu is wrong" in words for _, _, words in found)


def test_an_alert_that_opens_again_milder_says_so(told: Told) -> None:
    raise_alert(told, "cpu", "critical")
    raise_alert(told, "cpu", "critical", "resolve")
    raise_alert(told, "cpu", "info", "reopen", 99)
    assert [event for _, event, _ in changes_of_severity(told, "cpu")] == ["better"]


@pytest.mark.sql
def test_an_alert_that_flips_for_hours_keeps_its_newest_changes(told: Told) -> None:
    raise_alert(told, "cpu", "info")
    for step in range(2, 302):
        told.now += 60
        raise_alert(told, "cpu", "info" if step % 2 else "critical", "update", step)
    with told.database.read() as connection:
        found = history.history_of(connection, "cpu")
    assert len(found) < 100
    assert found[0]["event"] == "fired", "what is no change of severity stays"
    assert datetime.fromisoformat(found[-1]["time"]).timestamp() == told.now


@pytest.mark.sql
def test_warnings_of_a_run_come_together_and_what_is_critical_at_once(told: Told) -> None:
    told.database.write(
        lambda connection: connection.execute(update(channel).values(kind="slack", group_s=600.0)) and None
    )
    raise_alert(told, "data_bound", "warning")
    raise_alert(told, "sync_bound", "warning")
    assert sent_now(told) == [], "troubles seldom come alone"
    told.now += waits.GATHERED_S
    assert messages(told) == [["data_bound", "sync_bound"]]
    delivered(told)
    first = told.now
    raise_alert(told, "eval_bound", "warning")
    told.now += 60
    raise_alert(told, "hang", "critical")
    assert messages(told) == [["hang"]]
    delivered_only(told, "hang")
    raise_alert(told, "data_bound", "warning", "resolve")
    told.now = first + 60 + 599
    assert messages(told) == []
    told.now += 1
    assert messages(told) == [["data_bound", "eval_bound"]] or messages(told) == [["eval_bound", "data_bound"]]


def test_what_went_out_together_and_failed_is_tried_again_together(told: Told) -> None:
    told.database.write(
        lambda connection: connection.execute(update(channel).values(kind="slack", group_s=600.0)) and None
    )
    for name in ("data_bound", "sync_bound", "eval_bound"):
        raise_alert(told, name, "warning")
    told.now += waits.GATHERED_S
    with told.database.read() as connection:
        [batch] = what_is_due(connection, told.now, {}).batches
    failed = Outcome(503, "not now")
    told.database.write(lambda connection: retries.write_down(connection, batch.rows, failed, told.now, lambda _: None))
    assert len({row["due"] for row in told.deliveries()}) == 1
    told.now += 2.0
    assert messages(told) == [["data_bound", "sync_bound", "eval_bound"]]


def messages(told: Told) -> list[list[str]]:
    """The alerts in each message that would go out now. What is put off is put off for good."""
    with told.database.read() as connection:
        due = what_is_due(connection, told.now, {})
    told.database.write(lambda connection: put_off(connection, due.later))
    return [[row["alert"] for row in batch.rows] for batch in due.batches]


def delivered_only(told: Told, name: str) -> None:
    values = {"state": "delivered", "tries": 1, "delivered": told.now}
    its = update(delivery).where(delivery.c.alert == name)
    told.database.write(lambda connection: connection.execute(its.values(**values)) and None)


def test_a_channel_for_one_project_or_tag_is_told_of_no_other(told: Told) -> None:
    told.database.write(lambda connection: connection.execute(update(channel).values(projects='["q"]')) and None)
    told.judge([1, 2], loss=[2.0, NAN])
    assert told.due() == []
    told.database.write(
        lambda connection: connection.execute(update(channel).values(projects="[]", tags='["x"]')) and None
    )
    told.judge([9000], loss=[math.nan], after_s=4000.0)
    assert told.due() == []


def test_until_is_the_latest_of_mute_snooze_and_silence(told: Told) -> None:
    silenced(told, lasts_s=HOUR, project="p")
    told.judge([1, 2], loss=[2.0, NAN])
    told.mute(told.id(), 2 * HOUR)
    snooze(told, 3 * HOUR)
    with told.database.read() as connection:
        assert quiet.Quiet(connection, told.now).until([told.id()]) == {told.id(): told.now + 3 * HOUR}
