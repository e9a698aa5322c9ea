"""A wall clock that was wrong for a moment, or for long, keeps no message from a channel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import Clock
from engine_bench import NOW, Bench
from sqlalchemy import update

from perfagent.wire import Finding
from perfagent_server.alerts import reminders, tables
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.state_machine import Change
from perfagent_server.security.outbound import Guard, Reply
from perfagent_server.store.tables import alert, channel

HOUR, MONTH = 3600.0, 30 * 86_400.0


class Channel(Bench):
    """A channel whose outbox goes by hand, with a wall clock that jumps beside the monotonic one. answers: of the next
    tries; then 200."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.wall, self.mono = Clock(NOW), Clock(1000.0)
        self.got: list[str] = []
        self.answers: list[int] = []
        self.outbox = self.new_outbox()

    def new_outbox(self) -> Outbox:
        return Outbox(self.database, clock=self.wall, monotonic=self.mono, send=self._send)

    def _send(self, guard: Guard, url: str, body: bytes, headers: dict[str, str]) -> Reply:
        status = self.answers.pop(0) if self.answers else 200
        if status == 200:
            self.got.append("firing" if b'"alert.firing"' in body else "resolved")
        return Reply(status, {})

    def wait(self, seconds: float) -> None:
        self.wall.at += seconds
        self.mono.at += seconds

    def look(self, times: int = 1) -> None:
        """The outbox sends what it says is due, and the answers are written down."""
        launched: list = []
        self.outbox._launch = launched.append  # type: ignore[method-assign]
        for _ in range(times):
            self.outbox._schedule()
            while launched:
                self.outbox._deliver(launched.pop(0))

    def change(self, kind: str, *, severity: str = "warning", opening: int = 1) -> None:
        found = Finding(rule="data_bound", severity=severity, message="slow", ranks=[0])  # type: ignore[arg-type]
        change = Change(kind, "al", found, 1, self.wall.at, opening=opening)  # type: ignore[arg-type]
        link = "http://here/run/{}".format
        self.database.write(lambda connection: tables.apply(connection, [("r", change)], self.wall.at, link))

    def set_channel(self, **values: object) -> None:
        self.database.write(lambda connection: connection.execute(update(channel).values(**values)) and None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Channel]:
    made = Channel(tmp_path)
    yield made
    made.database.close()


@pytest.mark.fault
@pytest.mark.parametrize("jump", [HOUR, MONTH, -HOUR])
def test_s1_a_nan_that_a_clock_ahead_has_dated_is_sent_at_once(bench: Channel, jump: float) -> None:
    engine = bench.engine(clock=bench.wall, monotonic=bench.mono)
    engine.run_once()
    bench.wall.at += jump
    bench.send({"loss": [2.0, math.nan]}, [1, 2])
    engine.run_once()
    bench.wall.at -= jump
    bench.look()
    assert bench.got == ["firing"]


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("jump", [HOUR, MONTH])
def test_messages_of_an_alert_keep_their_order_after_a_jump(bench: Channel, jump: float, is_restarted: bool) -> None:
    bench.send({"loss": [2.0]}, [1])
    bench.wall.at += jump
    bench.change("fire")
    bench.wall.at -= jump
    bench.change("resolve")
    bench.answers = [500]
    if is_restarted:
        bench.outbox = bench.new_outbox()
    for _ in range(5):
        bench.look()
        bench.wait(10)
    assert bench.got == ["firing", "resolved"]


@pytest.mark.parametrize("jump", [HOUR, MONTH])
def test_a_retry_that_a_clock_ahead_has_dated_is_made_when_it_is_back(bench: Channel, jump: float) -> None:
    bench.send({"loss": [2.0]}, [1])
    bench.change("fire")
    bench.answers = [500]
    bench.wall.at += jump
    bench.look()
    bench.wall.at -= jump
    bench.wait(5)
    bench.look()
    assert bench.got == ["firing"]


def test_an_alert_that_opened_again_by_a_clock_ahead_waits_no_longer_for_it(bench: Channel) -> None:
    bench.send({"loss": [2.0]}, [1])
    bench.change("fire")
    bench.change("resolve")
    bench.look(2)
    bench.wall.at += MONTH
    bench.change("reopen", opening=2)
    bench.wall.at -= MONTH
    bench.outbox = bench.new_outbox()
    bench.look()
    assert bench.got == ["firing", "resolved", "firing"]


def test_a_chat_that_was_told_by_a_clock_ahead_is_told_of_the_next_alert(bench: Channel) -> None:
    bench.send({"loss": [2.0]}, [1])
    bench.change("fire")
    bench.wall.at += MONTH
    bench.look()
    bench.wall.at -= MONTH
    bench.set_channel(kind="slack", group_s=600.0)
    bench.send({"loss": [2.0, math.nan]}, [2, 3])
    found = Finding(rule="slow", severity="warning", message="slow", ranks=[0])
    change = Change("fire", "al_2", found, 1, bench.wall.at)
    bench.database.write(lambda connection: tables.apply(connection, [("r", change)], bench.wall.at, "{}".format))
    launched: list = []
    bench.outbox._launch = launched.append  # type: ignore[method-assign]
    for _ in range(3):
        bench.wait(10)
        bench.outbox._schedule()
    assert launched, "no message of the last ten minutes holds it back"


def test_a_reminder_comes_although_the_firing_was_dated_by_a_clock_ahead(bench: Channel) -> None:
    bench.set_channel(repeat_s=600.0)
    bench.send({"loss": [2.0]}, [1])
    bench.wall.at += MONTH
    bench.change("fire")
    bench.wall.at -= MONTH
    bench.look()
    link = "http://here/run/{}".format

    def remind(connection: object) -> None:
        again = reminders.due_again(connection, bench.wall.at)  # type: ignore[arg-type]
        reminders.repeat(connection, again, bench.wall.at, link)  # type: ignore[arg-type]

    for _ in range(4):
        bench.wait(301)
        bench.database.write(remind)
        bench.look()
    assert bench.got == ["firing", "firing", "firing"], "one at once, and one after ten minutes"


def test_what_people_made_quiet_stays_quiet_after_a_clock_was_set_back(bench: Channel) -> None:
    bench.send({"loss": [2.0]}, [1])
    bench.change("fire")
    until = update(alert).values(snoozed_until=NOW + MONTH)
    bench.database.write(lambda connection: connection.execute(until) and None)
    bench.look()
    bench.wall.at -= HOUR
    bench.look(3)
    assert bench.got == []
    bench.wait(MONTH + 2 * HOUR)
    bench.look()
    assert bench.got == ["firing"]
