"""What the rules make of a wall clock that jumps, or stands: nothing. And of a patience that a project has set."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Event
from perfagent_server.engine.rule_settings import RULES_FILE, RuleSettings
from perfagent_server.engine.scheduler import Engine
from perfagent_server.store.tables import alert, rule_setting, source

BEGAN = [Event(kind="state", time=NOW, data={"state": "running", "world_size": 2})]
RUNS = [Event(kind="state", time=NOW, data={"state": "running"})]


class Clocks:
    """Of an engine. pace: how fast the wall clock goes."""

    def __init__(self, bench: Bench, **options: Any) -> None:
        self.bench, self.options = bench, options
        self.wall, self.mono, self.pace = Clock(NOW), Clock(1000.0), 1.0
        self.restart()

    def restart(self) -> None:
        self.engine: Engine = self.bench.engine(clock=self.wall, monotonic=self.mono, **self.options)

    def wait(self, seconds: float) -> None:
        self.mono.at += seconds
        self.wall.at += self.pace * seconds

    def send(self, values: dict[str, Any], steps: Any, *, events: list[Event] | None = None) -> None:
        self.bench.send(values, steps, now=self.wall.at, events=events or [])
        self.engine.run_once()

    def train(self) -> None:
        for step in range(1, 11):
            self.send({"step_time_s": [1.0], "loss": [2.0]}, [step])
            self.wait(1)

    def hang(self) -> list[str]:
        """The process is heard for two minutes, and no step ends; the rules that fired."""
        for _ in range(40):
            self.send({"process/rss_bytes": [1e9]}, [10])
            self.wait(3)
        return [row["rule"] for row in self.bench.rows(alert)]


@pytest.mark.fault
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_s10_a_clock_that_was_wrong_for_a_moment_hides_no_hang(bench: Bench, jump: float, is_restarted: bool) -> None:
    clocks = Clocks(bench)
    clocks.train()
    clocks.wall.at += jump
    if is_restarted:
        clocks.restart()
    clocks.send({"step_time_s": [1.0]}, [11])
    clocks.engine.checkpoint()
    clocks.wall.at -= jump
    if is_restarted:
        clocks.restart()
    assert clocks.hang() == ["hang"]


@pytest.mark.fault
def test_s10_a_clock_that_stands_hides_no_hang(bench: Bench) -> None:
    clocks = Clocks(bench)
    clocks.train()
    clocks.pace = 0.0
    assert clocks.hang() == ["hang"]


@pytest.mark.fault
@pytest.mark.parametrize("pace", [0.0, 1.0])
def test_s10_a_step_waits_for_a_dead_rank_no_longer_than_usual(bench: Bench, pace: float) -> None:
    clocks = Clocks(bench)
    clocks.wall.at += 3600
    clocks.send({"lr": [0.1]}, [1], events=BEGAN)
    clocks.wall.at -= 3600
    clocks.pace = pace
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(400)] + [9.0] * 20
    clocks.send({"loss": losses}, range(1, 421))
    for _ in range(10):
        clocks.engine.run_once()
        clocks.wait(3)
    assert [row["rule"] for row in bench.rows(alert)] == ["loss_spike"]


def with_setting(bench: Bench, project: str = "p", **settings: Any) -> Clocks:
    row = {"project": project, "rule": "lost_contact", "settings": json.dumps(settings)}
    bench.write(rule_setting.insert().values(**row))
    found = RuleSettings(bench.database, bench.settings.data / RULES_FILE)
    return Clocks(bench, plan_of=found.plan_of)


def after(clocks: Clocks, seconds: float) -> tuple[list[str], str]:
    """The alerts that fire after so long, and the state of the source."""
    clocks.wait(seconds)
    clocks.engine.run_once()
    clocks.engine.look_for_silence()
    bench = clocks.bench
    return [row["rule"] for row in bench.rows(alert) if row["state"] == "firing"], bench.rows(source)[0]["state"]


@pytest.mark.parametrize("after_s", [10, 60])
def test_agent_is_lost_after_the_silence_set_by_its_project(bench: Bench, after_s: int) -> None:
    clocks = with_setting(bench, after_s=after_s)
    clocks.wait(100)
    clocks.send({"loss": [1.0]}, [1], events=RUNS)
    assert after(clocks, 0) == ([], "running")
    assert after(clocks, after_s - 1) == ([], "running")
    assert after(clocks, 2) == (["lost_contact"], "lost")
    clocks.send({"loss": [1.0]}, [2])
    assert [row["state"] for row in bench.rows(alert)] == ["resolved"]


@pytest.mark.parametrize(
    ("said", "settings", "rules", "becomes"),
    [
        (RUNS, {"enabled": False}, [], "lost"),
        ([], {}, ["lost_contact"], "lost"),  # a server refuses a state event for one wrong field
        ([Event(kind="state", time=NOW, data={"state": "running", "heartbeat": False})], {}, [], "running"),
    ],
    ids=["the rule is off", "no state came", "it sends no heartbeat"],
)
def test_what_becomes_of_a_silent_sender(
    bench: Bench, said: list[Event], settings: dict[str, bool], rules: list[str], becomes: str
) -> None:
    clocks = with_setting(bench, "", **settings)
    clocks.wait(100)
    clocks.send({"loss": [1.0]}, [1], events=said)
    after(clocks, 0)
    assert after(clocks, 31) == (rules, becomes)
