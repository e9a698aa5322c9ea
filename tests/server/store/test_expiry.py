"""What grows beside samples is deleted by age, and nothing that is still open."""

from __future__ import annotations

from typing import Any

import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import func, insert, select, update

from perfagent.wire import Event
from perfagent_server.store import tables
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy, expiry
from perfagent_server.store.retention.policy import Scope

LATER = BEGIN + 100 * DAY_S


@pytest.fixture
def old(shelf):
    """A run that sent and ended at BEGIN, beside one that is alive a hundred days later."""
    shelf.append(
        frame(1, state("running"), Event(kind="log", time=BEGIN, data={"lines": ["old"]}), rows({"loss": [1.0]}, [1]))
    )
    shelf.append(frame(2, state("finished")))
    shelf.append(
        frame(1, state("running", time=LATER), Event(kind="log", time=LATER, data={"lines": ["new"]}), run="alive"),
        now=LATER,
    )
    shelf.compact()
    return shelf


def retain(shelf, now: float = LATER, **days: float) -> dict[str, int]:
    retention = Retention(shelf.database, shelf.store, RetentionPolicy(**days), clock=lambda: now)
    retention.run_once()
    return retention.counters


def kinds(shelf) -> list[tuple[str, str]]:
    with shelf.database.read() as connection:
        found = connection.execute(select(tables.event.c.run, tables.event.c.kind).order_by(tables.event.c.id)).all()
    return [tuple(row) for row in found]


def count(shelf, table) -> int:
    with shelf.database.read() as connection:
        return connection.execute(select(func.count()).select_from(table)).scalar_one()


def test_old_events_go_and_states_stay(old) -> None:
    counters = retain(old, events_days=90)
    assert counters["events_deleted"] == 1
    assert kinds(old) == [("r1", "state"), ("r1", "state"), ("alive", "state"), ("alive", "log")]


def test_without_a_setting_everything_stays(old) -> None:
    before = kinds(old)
    retain(old)
    retain(old, events_days=float("inf"), profiles_days=float("inf"), alerts_days=float("inf"), audit_days=float("inf"))
    assert kinds(old) == before


def test_an_event_whose_sender_lives_in_another_year_is_not_old(old) -> None:
    old.append(frame(2, Event(kind="log", time=100.0, data={"lines": ["clock not set"]}), run="alive"), now=LATER)
    assert retain(old, events_days=90)["events_deleted"] == 1
    assert kinds(old)[-1] == ("alive", "log")


@pytest.mark.sqlite
def test_old_events_are_found_by_their_index(old) -> None:
    search = expiry._events(LATER, Scope(None)).compile(
        dialect=old.database.engine.dialect, compile_kwargs={"literal_binds": True}
    )
    with old.database.read() as connection:
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {search}").all()
    assert "ix_event_time" in plan[0][3]


def test_old_profiles_go_with_their_traces(old) -> None:
    def profile(time: float) -> list[Event]:
        whole = Event(kind="profile", time=time, data={"profile": f"p{time:.0f}", "parts": 20})
        part = {"profile": f"p{time:.0f}", "payload": b"x"}
        return [whole, *(Event(kind="profile", time=time, data={**part, "part": at}) for at in range(1, 21))]

    old.append(frame(3, *profile(BEGIN + 1), *profile(LATER)))
    counters = retain(old, profiles_days=90)
    assert (counters["profiles_deleted"], counters["profile_parts_deleted"]) == (1, 20)
    assert (count(old, tables.profile), count(old, tables.profile_part)) == (1, 20)


def alert(name: str, how: str, run: str = "r1", **more: Any) -> dict[str, Any]:
    return {
        "id": name, "run": run, "rule": "x", "severity": "warning", "state": how, "message": "", "since": BEGIN,
        "fired": BEGIN, "fix": "", "evidence": "{}", "ranks": "[]", **more,
    }  # fmt: skip


def test_only_alerts_that_are_over_go_and_only_of_runs_that_are_silent(old) -> None:
    over = {"resolved": BEGIN + 5}
    rows_of_alerts = [
        alert("over", "resolved", **over), alert("young", "resolved", resolved=LATER - DAY_S),
        alert("open", "firing", resolved=None), alert("alive", "resolved", run="alive", **over),
    ]  # fmt: skip
    told = {
        "id": "d1", "channel": "c", "alert": "over", "event": "alert.firing", "body": b"", "state": "delivered",
        "tries": 1, "created": BEGIN, "due": BEGIN, "error": "",
    }  # fmt: skip

    def fill(connection) -> None:
        channel = {"id": "c", "name": "", "kind": "webhook", "url": "", "secret": "", "created": BEGIN}
        connection.execute(insert(tables.channel).values(**channel))
        for row in rows_of_alerts:
            connection.execute(insert(tables.alert).values(**row))
        for more in ({}, {"id": "d2", "alert": None}, {"id": "d3", "alert": None, "state": "waiting"}):
            connection.execute(insert(tables.delivery).values(**{**told, **more}))

    old.database.write(fill)
    counters = retain(old, alerts_days=90)
    assert (counters["alerts_deleted"], counters["notices_deleted"]) == (1, 1)
    with old.database.read() as connection:
        left = connection.execute(select(tables.alert.c.id).order_by(tables.alert.c.id)).scalars().all()
        assert left == ["alive", "open", "young"]
        assert connection.execute(select(tables.delivery.c.id)).scalars().all() == ["d3"]


def test_old_rows_of_the_audit_log_go(old) -> None:
    def fill(connection) -> None:
        for at in range(1200):
            time = BEGIN if at < 1100 else LATER
            connection.execute(insert(tables.audit).values(time=time, who="x", origin="", action="a", detail=""))

    old.database.write(fill)
    assert retain(old, audit_days=90)["audit_rows_deleted"] == 1100
    assert count(old, tables.audit) == 101  # the last one says that the others went


def test_nothing_goes_while_the_clock_is_in_doubt(old) -> None:
    counters = retain(old, now=LATER + 400 * DAY_S, events_days=90)
    assert (counters["events_deleted"], counters["refused"]) == (0, 1)
    old.database.write(lambda connection: connection.execute(update(tables.run).values(updated=LATER + 400 * DAY_S)))
    assert retain(old, now=LATER + 400 * DAY_S, events_days=90)["events_deleted"] == 2
