"""What the engine makes of a snapshot that is lost, or of another version: no alert comes twice, none is swallowed, and
one that is open goes on under its id."""

from __future__ import annotations

import math

import pytest
from clocks import Clock
from engine_bench import NOW, Bench
from sqlalchemy import delete, update

from perfagent.wire import Event
from perfagent_server.store.tables import alert, delivery, rule_state
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

NAN = {"loss": [2.0] * 9 + [math.nan]}
HOW = {
    "deleted": delete(rule_state),
    "of another version": update(rule_state).values(version=0),
    "broken": update(rule_state).values(state=b"\xc1"),
    "compacted": delete(rule_state),
}
each_way = pytest.mark.parametrize("how", HOW)


def lose(bench: Bench, how: str) -> None:
    """Nothing can be read of any snapshot any more. compacted: nor are the frames in the tail any more."""
    if how == "compacted":
        Compactor(bench.database, policy=CompactionPolicy(age_s=-math.inf)).run_once()
    bench.write(HOW[how])


def judge_all(bench: Bench, at: float = NOW) -> None:
    engine = bench.engine(clock=Clock(at))
    while engine.run_once():
        pass
    engine.checkpoint()


def events(bench: Bench) -> list[str]:
    found = sorted(bench.rows(delivery), key=lambda row: row["created"])
    return [row["event"].removeprefix("alert.") for row in found]


def states(bench: Bench) -> list[tuple[str, str]]:
    return [(row["rule"], row["state"]) for row in bench.rows(alert)]


@each_way
def test_new_alert_is_not_swallowed_by_an_older_one_of_its_rule(bench: Bench, how: str) -> None:
    bench.send(NAN, range(1, 11))
    bench.send({"loss": [2.0] * 190}, range(11, 201))
    judge_all(bench)
    lose(bench, how)
    later = NOW + 7200
    for begin in range(201, 5001, 600):
        steps = range(begin, begin + 600)
        bench.send({"loss": [2.0 - step / 5000 + 0.001 * (step % 7) for step in steps]}, steps, now=later)
    bench.send({"loss": [math.nan]}, [5001], now=later)
    judge_all(bench, later)
    rows = [row for row in bench.rows(alert) if row["rule"] == "nonfinite_loss"]
    assert sorted((row["since_step"], row["state"]) for row in rows) == [(10, "resolved"), (5001, "firing")]
    ids = {row["id"] for row in rows}
    assert len(ids) == 2
    sent = sorted(row["event"] for row in bench.rows(delivery) if row["alert"] in ids)
    assert sent == ["alert.firing", "alert.firing", "alert.resolved"]


@each_way
def test_firing_alert_goes_on_until_its_trouble_is_over(bench: Bench, how: str) -> None:
    bench.send(NAN, range(1, 11))
    judge_all(bench)
    [first] = bench.rows(alert)
    for values, steps in (([math.nan] * 20, range(11, 31)), ([2.0] * 40, range(31, 71))):
        lose(bench, how)
        bench.send({"loss": values}, steps)
        judge_all(bench)
        [row] = bench.rows(alert)
        assert (row["id"], row["since_step"], row["state"]) == (first["id"], 10, "firing")
    lose(bench, how)
    bench.send({"loss": [2.0] * 60}, range(71, 131))
    judge_all(bench)
    assert states(bench) == [("nonfinite_loss", "resolved")]
    assert events(bench) == ["firing", "resolved"]


@each_way
def test_a_spike_is_measured_against_the_losses_that_are_stored(bench: Bench, how: str) -> None:
    """The 128 steps before it are in the store; without them the rule would be blind for as long again."""
    bench.send({"loss": [3.0 + 0.02 * math.sin(7.0 * step) for step in range(400)]}, range(1, 401))
    judge_all(bench)
    lose(bench, how)
    bench.send({"loss": [9.0] * 20}, range(401, 421))
    judge_all(bench)
    assert states(bench) == [("loss_spike", "firing")]


@pytest.mark.parametrize("first", ["the new attempt", "the older attempt"])
def test_end_of_an_older_attempt_is_an_alert_in_any_order(bench: Bench, first: str) -> None:
    """torchrun starts the job again before the last frame of the rank that ran out of memory has come."""
    ended = Event(kind="state", time=NOW, step=20, data={"state": "oom", "reason": "CUDA out of memory"})
    running = Event(kind="state", time=NOW, data={"state": "running", "world_size": 1})
    if first == "the older attempt":
        bench.send({"loss": [2.0] * 20}, range(1, 21), attempt=1)
    bench.send({"loss": [2.0] * 5}, range(1, 6), attempt=2, events=[running])
    bench.send({}, [], attempt=1, events=[ended])
    bench.send({}, [], attempt=1, rank=1, events=[Event(kind="state", time=NOW, step=20, data={"state": "failed"})])
    judge_all(bench)
    assert states(bench) == [("oom_observed", "resolved")]
    assert events(bench) == ["firing", "resolved"]
    assert bench.engine().verdict("r").rule == "healthy"


@each_way
def test_a_run_that_hangs_goes_on_hanging_when_its_state_is_lost(bench: Bench, how: str) -> None:
    wall = Clock(NOW)

    def wait(seconds: float) -> list[tuple[str, str]]:
        """A server judges for so long, and is then killed with a fresh checkpoint."""
        engine = bench.engine(clock=wall)
        for _ in range(int(seconds / 3)):
            while engine.run_once():
                pass
            wall.at += 3.0
        engine.run_once()
        engine.checkpoint()
        return [(row["id"], row["state"]) for row in bench.rows(alert)]

    bench.send({"step_time_s": [1.0] * 10}, range(1, 11))
    [(ident, state)] = wait(72)
    assert (state, bench.told()) == ("firing", [("r", "hang")])
    lose(bench, how)
    bench.send({"process/rss_bytes": [1e9]}, [10], now=wall.at)
    assert wait(72) == [(ident, "firing")]
    assert events(bench) == ["firing"]
    bench.send({"step_time_s": [1.0]}, [11], now=wall.at)
    assert wait(6) == [(ident, "resolved")]
