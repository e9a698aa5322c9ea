"""What the rules make of a wall clock that jumps, or stands: nothing. And of a patience that a project has set."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Event
from perfagent_server.engine.rule_settings import RULES_FILE, RuleSettings
from perfagent_server.engine.scheduler import Engine
from perfagent_server.store.tables import alert, rule_setting, source

BEGAN = [Event(kind="state", time=NOW, data={"state": "running", "world_size": 2})]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


class Clocks:
    """pace: how fast the wall clock goes."""

    def __init__(self) -> None:
        self.wall, self.mono, self.pace = Clock(NOW), Clock(1000.0), 1.0

    def wait(self, seconds: float) -> None:
        self.mono.at += seconds
        self.wall.at += self.pace * seconds

    def engine(self, bench: Bench) -> Engine:
        return bench.engine(clock=self.wall, monotonic=self.mono)


def train(bench: Bench, clocks: Clocks, engine: Engine, steps: range) -> None:
    for step in steps:
        bench.send({"step_time_s": [1.0], "loss": [2.0]}, [step], now=clocks.wall.at)
        engine.run_once()
        clocks.wait(1)


def hang(bench: Bench, clocks: Clocks, engine: Engine) -> list[str]:
    """The processes are heard for two minutes, and no step ends; the rules that fired."""
    for _ in range(40):
        bench.send({"process/rss_bytes": [1e9]}, [10], now=clocks.wall.at)
        engine.run_once()
        clocks.wait(3)
    return [row["rule"] for row in bench.rows(alert)]


@pytest.mark.fault
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_s10_a_clock_that_was_wrong_for_a_moment_hides_no_hang(bench: Bench, jump: float, is_restarted: bool) -> None:
    clocks = Clocks()
    engine = clocks.engine(bench)
    train(bench, clocks, engine, range(1, 11))
    clocks.wall.at += jump
    if is_restarted:
        engine = clocks.engine(bench)
    bench.send({"step_time_s": [1.0]}, [11], now=clocks.wall.at)
    engine.run_once()
    engine.checkpoint()
    clocks.wall.at -= jump
    if is_restarted:
        engine = clocks.engine(bench)
    assert hang(bench, clocks, engine) == ["hang"]


@pytest.mark.fault
def test_s10_a_clock_that_stands_hides_no_hang(bench: Bench) -> None:
    clocks = Clocks()
    engine = clocks.engine(bench)
    train(bench, clocks, engine, range(1, 11))
    clocks.pace = 0.0
    assert hang(bench, clocks, engine) == ["hang"]


@pytest.mark.fault
@pytest.mark.parametrize("pace", [0.0, 1.0])
def test_s10_a_step_waits_for_a_dead_rank_no_longer_than_usual(bench: Bench, pace: float) -> None:
    clocks = Clocks()
    engine = clocks.engine(bench)
    clocks.wall.at += 3600
    bench.send({"lr": [0.1]}, [1], now=clocks.wall.at, events=BEGAN)
    engine.run_once()
    clocks.wall.at -= 3600
    clocks.pace = pace
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(400)] + [9.0] * 20
    bench.send({"loss": losses}, range(1, 421), now=clocks.wall.at)
    for _ in range(10):
        engine.run_once()
        clocks.wait(3)
    assert [row["rule"] for row in bench.rows(alert)] == ["loss_spike"]


@pytest.mark.parametrize("after_s", [10, 60])
def test_an_agent_is_lost_after_the_silence_that_its_project_has_set(bench: Bench, after_s: int) -> None:
    row = {"project": "p", "rule": "lost_contact", "settings": json.dumps({"after_s": after_s})}
    bench.database.write(lambda connection: connection.execute(rule_setting.insert().values(**row)))
    settings = RuleSettings(bench.database, bench.settings.data / RULES_FILE)
    clocks = Clocks()
    engine = bench.engine(clock=clocks.wall, monotonic=clocks.mono, plan_of=settings.plan_of)
    clocks.wait(100)
    bench.send(
        {"loss": [1.0]}, [1], now=clocks.wall.at, events=[Event(kind="state", time=NOW, data={"state": "running"})]
    )
    engine.run_once()

    def after(seconds: float) -> tuple[list[str], str]:
        clocks.wait(seconds)
        engine.run_once()
        engine.look_for_silence()
        return [row["rule"] for row in bench.rows(alert)], bench.rows(source)[0]["state"]

    assert after(0) == ([], "running")
    assert after(after_s - 1) == ([], "running")
    assert after(2) == (["lost_contact"], "lost")
    bench.send({"loss": [1.0]}, [2], now=clocks.wall.at)
    engine.run_once()
    assert [row["state"] for row in bench.rows(alert)] == ["resolved"]


def test_an_agent_whose_rule_is_off_is_called_lost_and_raises_no_alert(bench: Bench) -> None:
    row = {"project": "", "rule": "lost_contact", "settings": json.dumps({"enabled": False})}
    bench.database.write(lambda connection: connection.execute(rule_setting.insert().values(**row)))
    settings = RuleSettings(bench.database, bench.settings.data / RULES_FILE)
    clocks = Clocks()
    engine = bench.engine(clock=clocks.wall, monotonic=clocks.mono, plan_of=settings.plan_of)
    clocks.wait(100)
    bench.send(
        {"loss": [1.0]}, [1], now=clocks.wall.at, events=[Event(kind="state", time=NOW, data={"state": "running"})]
    )
    engine.run_once()
    for _ in range(2):
        engine.look_for_silence()
        clocks.wait(31)
        engine.run_once()
    assert (bench.rows(alert), bench.rows(source)[0]["state"]) == ([], "lost")


@pytest.mark.parametrize(("told", "becomes"), [([], "lost"), ([{"heartbeat": False}], "running")])
def test_a_sender_whose_state_never_came_is_lost_too(bench: Bench, told: list[dict[str, bool]], becomes: str) -> None:
    """A server refuses a state event for one wrong field. Only who says that it sends no heartbeat is let be."""
    clocks = Clocks()
    engine = clocks.engine(bench)
    clocks.wait(100)
    events = [Event(kind="state", time=NOW, data={"state": "running", **data}) for data in told]
    bench.send({"loss": [1.0]}, [1], now=clocks.wall.at, events=events)
    engine.run_once()
    for _ in range(2):
        engine.look_for_silence()
        clocks.wait(31)
        engine.run_once()
    alerts = ["lost_contact"] if becomes == "lost" else []
    assert (bench.rows(source)[0]["state"], [row["rule"] for row in bench.rows(alert)]) == (becomes, alerts)
