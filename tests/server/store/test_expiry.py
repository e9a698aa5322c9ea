"""What grows beside samples is deleted by age, and nothing that is still open."""

from __future__ import annotations

from typing import Any

import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import insert, select, update

from perfagent.wire import Event
from perfagent_server.store import tables
from perfagent_server.store.retention import DAY_S

LATER = BEGIN + 100 * DAY_S


def said(time: float, line: str) -> Event:
    return Event(kind="log", time=time, data={"lines": [line]})


@pytest.fixture
def old(shelf):
    """A run that sent and ended at BEGIN, beside one that is alive a hundred days later."""
    shelf.append(frame(1, state("running"), said(BEGIN, "old"), rows({"loss": [1.0]}, [1])))
    shelf.append(frame(2, state("finished")))
    shelf.now = LATER
    shelf.append(frame(1, state("running", time=LATER), said(LATER, "new"), run="alive"))
    shelf.compact()
    return shelf


def retain(shelf, **days: float) -> dict[str, int]:
    retention = shelf.retention(**days)
    retention.run_once()
    return retention.counters


def kinds(shelf) -> list[tuple[str, str]]:
    return shelf.ask(select(tables.event.c.run, tables.event.c.kind).order_by(tables.event.c.id))


@pytest.mark.sql
def test_old_events_go_and_states_stay(old) -> None:
    before = kinds(old)
    retain(old)
    retain(old, **dict.fromkeys(("events_days", "profiles_days", "alerts_days", "audit_days"), float("inf")))
    assert kinds(old) == before, "without a setting everything stays"
    old.append(frame(2, said(100.0, "a clock that is not set is not old"), run="alive"))
    assert retain(old, events_days=90)["events_deleted"] == 1
    assert kinds(old) == [("r1", "state"), ("r1", "state"), *[("alive", kind) for kind in ("state", "log", "log")]]


@pytest.mark.sql
def test_old_profiles_go_with_their_traces(old) -> None:
    def profile(time: float) -> list[Event]:
        name = f"p{time:.0f}"
        parts = [{"profile": name, "payload": b"x", "part": at} for at in range(1, 21)]
        return [Event(kind="profile", time=time, data=data) for data in ({"profile": name, "parts": 20}, *parts)]

    old.append(frame(3, *profile(BEGIN + 1), *profile(LATER)))
    counters = retain(old, profiles_days=90)
    assert (counters["profiles_deleted"], counters["profile_parts_deleted"]) == (1, 20)
    assert (old.count(tables.profile), old.count(tables.profile_part)) == (1, 20)


def alert(name: str, how: str, run: str = "r1", **more: Any) -> dict[str, Any]:
    return {
        "id": name, "run": run, "rule": "x", "severity": "warning", "state": how, "message": "", "since": BEGIN,
        "fired": BEGIN, "fix": "", "evidence": "{}", "ranks": "[]", **more,
    }  # fmt: skip


@pytest.mark.sql
def test_alerts_that_are_over_go_if_their_runs_are_silent(old) -> None:
    over = {"resolved": BEGIN + 5}
    delivery = {
        "id": "d1", "channel": "c", "alert": "over", "event": "alert.firing", "body": b"", "state": "delivered",
        "tries": 1, "created": BEGIN, "due": BEGIN, "error": "",
    }  # fmt: skip
    channel = {"id": "c", "name": "", "kind": "webhook", "url": "", "secret": "", "created": BEGIN}
    old.execute(insert(tables.channel).values(**channel))
    for row in (
        alert("over", "resolved", **over), alert("young", "resolved", resolved=LATER - DAY_S),
        alert("open", "firing", resolved=None), alert("alive", "resolved", run="alive", **over),
    ):  # fmt: skip
        old.execute(insert(tables.alert).values(**row))
    for more in ({}, {"id": "d2", "alert": None}, {"id": "d3", "alert": None, "state": "waiting"}):
        old.execute(insert(tables.delivery).values(**{**delivery, **more}))
    counters = retain(old, alerts_days=90)
    assert (counters["alerts_deleted"], counters["notices_deleted"]) == (1, 1)
    assert sorted(old.ask(select(tables.alert.c.id))) == ["alive", "open", "young"]
    assert old.ask(select(tables.delivery.c.id)) == ["d3"]


@pytest.mark.sql
def test_old_rows_of_the_audit_log_go(old) -> None:
    entries = [{"time": BEGIN if at < 1100 else LATER, "who": "x", "action": "a"} for at in range(1200)]
    old.execute(insert(tables.audit).values([{**entry, "origin": "", "detail": ""} for entry in entries]))
    assert retain(old, audit_days=90)["audit_rows_deleted"] == 1100
    assert old.count(tables.audit) == 101  # the last one says that the others went


def test_nothing_goes_while_the_clock_is_in_doubt(old) -> None:
    old.now = LATER + 400 * DAY_S
    counters = retain(old, events_days=90)
    assert (counters["events_deleted"], counters["refused"]) == (0, 1)
    old.execute(update(tables.run).values(updated=old.now))
    assert retain(old, events_days=90)["events_deleted"] == 2
