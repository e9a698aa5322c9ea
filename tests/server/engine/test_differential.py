"""Whatever happens to the engine, its alerts and deliveries are those of an engine to which nothing happened.

A story is a sequence of arrivals: two ranks in frames of any size, some late, some repeated, some out of order, with
NaN, a spike, a slow loader, alerts of the script and an end. Both engines judge the same arrivals. One of them is
killed at any moment, with or without a checkpoint, loses its snapshots, or finds them of another version.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from case_selection import everyday
from clocks import Clock
from engine_bench import NOW, Bench
from sqlalchemy import delete, update

from perfagent.wire import Event
from perfagent_server.engine.scheduler import Engine
from perfagent_server.store.tables import alert, delivery, rule_state


@dataclass
class Arrival:
    rank: int
    steps: list[int]
    columns: dict[str, list[float]]
    events: list[Event] = field(default_factory=list)
    seq: int = 0


def story(seed: int) -> list[Arrival]:
    draw = Random(seed)
    nan_at = draw.choice([0, draw.randint(250, 700)])
    spike_at = draw.choice([0, draw.randint(300, 650)])
    slow_from = draw.choice([0, draw.randint(100, 600)])
    arrivals = [
        Arrival(rank, [], {}, [Event(kind="state", time=NOW, data={"state": "starting", "world_size": 2})])
        for rank in (0, 1)
    ]
    step = 1
    while step < 800:
        rows = draw.randint(1, 60)
        steps = list(range(step, step + rows))
        for rank in (0, 1):
            arrivals.append(Arrival(rank, steps, _columns(draw, steps, rank, nan_at, spike_at, slow_from)))
            if draw.random() < 0.03:
                said = Event(kind="alert", time=NOW + step, step=step, data={"title": f"look {draw.randint(0, 2)}"})
                arrivals[-1].events.append(said)
        step += rows
    how = draw.choice(["finished", "failed", "oom", ""])
    ended = Event(kind="state", time=NOW + step, step=step, data={"state": how})
    arrivals += [Arrival(rank, [], {}, [ended]) for rank in (0, 1) if how]
    _shuffle_a_little(draw, arrivals)
    return arrivals


def _columns(
    draw: Random, steps: list[int], rank: int, nan_at: int, spike_at: int, slow_from: int
) -> dict[str, list[float]]:
    def loss(step: int) -> float:
        if nan_at and step == nan_at and rank == 1:
            return math.nan
        return 3.0 + draw.gauss(0, 0.02) + (1.5 if spike_at and spike_at <= step < spike_at + 40 else 0.0)

    return {
        "loss": [loss(step) for step in steps],
        "step_time_s": [0.1] * len(steps),
        "phase/data_s": [0.05 if slow_from and step >= slow_from else 0.0 for step in steps],
        "lr": [1e-3] * len(steps),
        "grad/norm": [1.0 + 0.1 * draw.random() for _ in steps],
    }


def _shuffle_a_little(draw: Random, arrivals: list[Arrival]) -> None:
    """Late and out-of-order frames, and repeated ones (with the same number, which the ledger knows)."""
    for place in range(len(arrivals)):
        arrivals[place].seq = place + 1
    for place in range(2, len(arrivals) - 6):
        if draw.random() < 0.05:
            other = place + draw.randint(1, 4)
            arrivals[place], arrivals[other] = arrivals[other], arrivals[place]
    for _ in range(3):
        place = draw.randrange(len(arrivals))
        arrivals.insert(draw.randint(place, len(arrivals)), arrivals[place])


class Judged:
    """A database, and whoever judges what arrives there."""

    def __init__(self, folder: Path) -> None:
        self.bench, self.clock = Bench(folder), Clock(NOW)
        self.start()

    def start(self) -> None:
        self.engine: Engine = self.bench.engine(clock=self.clock, checkpoint_s=1e9)

    def arrive(self, one: Arrival) -> None:
        self.bench.seq[f"r-1-{one.rank}"] = one.seq - 1
        self.bench.send(one.columns, one.steps, rank=one.rank, events=one.events, now=self.clock.at)

    def judge(self) -> None:
        while self.engine.run_once():
            pass

    def outcome(self) -> list[list[str]]:
        facts = ("id", "rule", "severity", "state", "since_step")
        alerts = [str([row[name] for name in facts]) for row in self.bench.rows(alert)]
        return [sorted(alerts), sorted(f"{row['alert']} {row['event']}" for row in self.bench.rows(delivery))]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Judged, Judged]]:
    pair = Judged(tmp_path / "undisturbed"), Judged(tmp_path / "disturbed")
    yield pair
    for one in pair:
        one.bench.database.close()


def disturb(draw: Random, judged: Judged) -> None:
    """Something happens to the engine between two frames."""
    what = draw.random()
    if what < 0.4 or 0.6 <= what < 0.8:
        judged.engine.checkpoint()
    if 0.6 <= what < 0.8:
        lost = delete(rule_state) if draw.random() < 0.5 else update(rule_state).values(version=draw.choice([0, 1, 99]))
        judged.bench.write(lost)
    if what < 0.8:
        judged.start()  # the other one was killed


@pytest.mark.parametrize("seed", everyday(20, range(200)))
def test_disturbed_engine_has_the_alerts_of_an_undisturbed_one(two: tuple[Judged, Judged], seed: int) -> None:
    undisturbed, disturbed = two
    draw = Random(1000 + seed)
    for one in story(seed):
        for judged in two:
            judged.arrive(one)
        undisturbed.judge()
        if draw.random() < 0.8:  # else it is judged later, with what comes next
            disturbed.judge()
        if draw.random() < 0.25:
            disturb(draw, disturbed)
        for judged in two:
            judged.clock.at += max(1, len(one.steps) // 2)
    for judged in two:
        judged.judge()
    assert disturbed.outcome() == undisturbed.outcome()
