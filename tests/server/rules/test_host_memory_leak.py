"""host_memory_leak: over time, by the memory of all ranks together."""

from __future__ import annotations

import math
import random

import pytest
from judging import START, fired, frame, make_evaluator, restored, state

from perfagent_server.alerts.state_machine import Change
from perfagent_server.rules.memory.host_memory_leak import HostMemoryLeak

GIB = 2.0**30


def run(rss: list[float], *, workers: list[float] | None = None, every_s: float = 3.0, ranks: int = 1) -> list[Change]:
    """A reading every few seconds, while steps are made."""
    evaluator = make_evaluator(rules=(HostMemoryLeak(),))
    changes: list[Change] = []
    for rank in range(ranks):
        changes += evaluator.take(
            frame({}, [], rank=rank, ident=rank + 1, events=[state("starting", world_size=ranks)])
        )
    for place, size in enumerate(rss):
        now = START + every_s * place
        for rank in range(ranks):
            columns = {"step_time_s": [0.1], "process/rss_bytes": [size / ranks]}
            if workers is not None:
                columns["process/workers_rss_bytes"] = [workers[place] / ranks]
            changes += evaluator.take(
                frame(columns, [place + 1], rank=rank, ident=evaluator.upto + 1, received=now, step_s=every_s)
            )
        changes += evaluator.tick(now)
        if place % 7 == 0:
            evaluator = restored(evaluator)
    return changes


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("readings", [80, 1000])
def test_memory_that_grows_all_the_time_is_a_leak(ranks: int, readings: int) -> None:
    draw = random.Random(1)
    grows = [2 * GIB + place * 20 * 2.0**20 + draw.gauss(0, 5e6) for place in range(readings)]
    [change] = fired(run(grows, ranks=ranks))
    assert change.finding.rule == "host_memory_leak"
    assert "The memory of the training processes grew from" in change.finding.message
    assert change.finding.evidence["bytes_per_hour"] == pytest.approx(20 * 2.0**20 * 1200, rel=0.1)


def test_workers_that_grow_are_told_as_such() -> None:
    flat, grows = [2 * GIB] * 80, [1 * GIB + place * 30 * 2.0**20 for place in range(80)]
    [change] = fired(run(flat, workers=grows))
    assert change.finding.cause == "loader workers"
    assert "numpy or Arrow" in change.finding.fix


@pytest.mark.parametrize(
    "healthy",
    [
        [2 * GIB] * 200,
        [2 * GIB + 4 * GIB * (1 - math.exp(-place / 10)) for place in range(200)],  # a cache that fills
        [2 * GIB + (place % 40) * 50 * 2.0**20 for place in range(200)],  # an epoch that is dropped at its end
        [2 * GIB + (GIB if place > 60 else 0.0) for place in range(200)],  # a second model
        [2 * GIB + place * 2.0**17 for place in range(200)],  # 25 MiB in ten minutes
    ],
    ids=["flat", "cache", "sawtooth", "jump", "little"],
)
def test_what_ends_falls_back_or_is_little_is_no_leak(healthy: list[float]) -> None:
    assert run(healthy) == []
