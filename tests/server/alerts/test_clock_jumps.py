"""A wall clock that was wrong for a moment, or for long, keeps no message from a channel."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clocks import Clock
from engine_bench import NOW, Bench
from posting import Posts
from sqlalchemy import update

from perfagent.wire import Finding
from perfagent_server.alerts import tables
from perfagent_server.alerts.outbox import Outbox
from perfagent_server.alerts.state_machine import Change
from perfagent_server.store.tables import alert

HOUR, MONTH = 3600.0, 30 * 86_400.0
LINK = "http://here/run/{}".format


class Channel(Bench):
    """A channel, and the wall clock of its outbox, which jumps beside the monotonic one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.wall, self.mono, self.posts = Clock(NOW), Clock(1000.0), Posts()
        self.restart()
        self.send({"loss": [2.0]}, [1])

    def restart(self) -> None:
        self.outbox = Outbox(self.database, clock=self.wall, monotonic=self.mono, send=self.posts)

    def wait(self, seconds: float) -> None:
        self.wall.at += seconds
        self.mono.at += seconds

    def change(self, kind: str, *, opening: int = 1, ahead_s: float = 0.0, name: str = "al") -> None:
        found = Finding(rule="data_bound", severity="warning", message="slow", ranks=[0])
        at = self.wall.at + ahead_s
        change = Change(kind, name, found, 1, at, opening=opening)  # type: ignore[arg-type]
        self.database.write(lambda connection: tables.apply(connection, [("r", change)], at, LINK))

    def set(self, statement: Any) -> None:
        self.database.write(lambda connection: connection.execute(statement) and None)


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
    bench.send({"loss": [2.0, math.nan]}, [2, 3])
    engine.run_once()
    bench.wall.at -= jump
    bench.outbox.send_due()
    assert bench.posts.arrived == ["firing"]


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("jump", [HOUR, MONTH])
def test_messages_keep_their_order_after_a_jump(bench: Channel, jump: float, is_restarted: bool) -> None:
    bench.change("fire", ahead_s=jump)
    bench.change("resolve")
    bench.posts.answer = lambda count: 500 if count == 1 else 200
    if is_restarted:
        bench.restart()
    for _ in range(5):
        bench.outbox.send_due()
        bench.wait(10)
    assert bench.posts.arrived == ["firing", "resolved"]


def test_a_snooze_lasts_although_the_clock_was_set_back(bench: Channel) -> None:
    bench.change("fire")
    bench.set(update(alert).values(snoozed_until=NOW + MONTH))
    bench.outbox.send_due()
    bench.wall.at -= HOUR
    for _ in range(3):
        bench.outbox.send_due()
    assert bench.posts.arrived == []
    bench.wait(MONTH + 2 * HOUR)
    bench.outbox.send_due()
    assert bench.posts.arrived == ["firing"]
