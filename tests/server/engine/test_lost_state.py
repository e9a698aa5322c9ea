"""What the engine makes of a snapshot that is lost, or of another version: no alert comes twice, none is swallowed, and
one that is open goes on under its id."""

from __future__ import annotations

import lzma
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import Clock
from engine_bench import NOW, Bench
from sqlalchemy import delete, update

from perfagent.wire import Event
from perfagent_server.store.tables import alert, delivery, rule_state
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

OLD = Path(__file__).parents[2] / "data" / "databases" / "schema_0005_with_a_firing_alert.db.xz"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


def lose(bench: Bench, how: str) -> None:
    """Nothing can be read of any snapshot any more. compacted: nor are the frames in the tail any more."""
    if how == "compacted":
        Compactor(bench.database, policy=CompactionPolicy(age_s=-math.inf)).run_once()
    change = {
        "deleted": delete(rule_state),
        "compacted": delete(rule_state),
        "of another version": update(rule_state).values(version=0),
        "broken": update(rule_state).values(state=b"\xc1"),
    }[how]
    bench.database.write(lambda connection: connection.execute(change))


HOW = ("deleted", "of another version", "broken", "compacted")


def judge_all(bench: Bench, at: float = NOW) -> None:
    engine = bench.engine(clock=Clock(at))
    while engine.run_once():
        pass
    engine.checkpoint()


@pytest.mark.parametrize("how", HOW)
def test_a_new_alert_is_not_swallowed_because_an_older_one_of_its_rule_had_its_id(bench: Bench, how: str) -> None:
    bench.send({"loss": [2.0] * 9 + [math.nan]}, range(1, 11))
    bench.send({"loss": [2.0] * 190}, range(11, 201))
    judge_all(bench)
    lose(bench, how)
    later = NOW + 7200
    for begin in range(201, 5001, 600):
        bench.send(
            {"loss": [2.0 - step / 5000 + 0.001 * (step % 7) for step in range(begin, begin + 600)]},
            range(begin, begin + 600),
            now=later,
        )
    bench.send({"loss": [math.nan]}, [5001], now=later)
    judge_all(bench, later)
    rows = [row for row in bench.rows(alert) if row["rule"] == "nonfinite_loss"]
    assert sorted((row["since_step"], row["state"]) for row in rows) == [(10, "resolved"), (5001, "firing")]
    ids = {row["id"] for row in rows}
    assert len(ids) == 2
    sent = sorted(row["event"] for row in bench.rows(delivery) if row["alert"] in ids)
    assert sent == ["alert.firing", "alert.firing", "alert.resolved"]


@pytest.mark.parametrize("how", HOW)
def test_an_alert_that_was_firing_is_resolved_when_its_trouble_is_over(bench: Bench, how: str) -> None:
    bench.send({"loss": [2.0] * 9 + [math.nan]}, range(1, 11))
    judge_all(bench)
    lose(bench, how)
    bench.send({"loss": [2.0] * 40}, range(11, 51))
    judge_all(bench)
    [open_] = bench.rows(alert)
    assert open_["state"] == "firing"
    lose(bench, how)
    bench.send({"loss": [2.0] * 60}, range(51, 111))
    judge_all(bench)
    [row] = bench.rows(alert)
    assert (row["id"], row["state"]) == (open_["id"], "resolved")
    assert [row["event"] for row in bench.rows(delivery)] == ["alert.firing", "alert.resolved"]


@pytest.mark.parametrize("how", HOW)
def test_a_nan_that_goes_on_is_the_same_alert(bench: Bench, how: str) -> None:
    bench.send({"loss": [2.0] * 9 + [math.nan]}, range(1, 11))
    judge_all(bench)
    lose(bench, how)
    bench.send({"loss": [math.nan] * 20}, range(11, 31))
    judge_all(bench)
    assert [(row["since_step"], row["state"]) for row in bench.rows(alert)] == [(10, "firing")]
    assert len(bench.rows(delivery)) == 1


@pytest.mark.parametrize("how", HOW)
def test_a_spike_is_measured_against_the_losses_that_are_stored(bench: Bench, how: str) -> None:
    """The 128 steps before it are in the store; without them the rule would be blind for as long again."""
    losses = [3.0 + 0.02 * math.sin(7.0 * step) for step in range(400)]
    bench.send({"loss": losses}, range(1, 401))
    judge_all(bench)
    lose(bench, how)
    bench.send({"loss": [9.0] * 20}, range(401, 421))
    judge_all(bench)
    assert [(row["rule"], row["state"]) for row in bench.rows(alert)] == [("loss_spike", "firing")]


@pytest.mark.parametrize("how", HOW)
def test_of_two_ranks_the_slower_one_is_waited_for_as_before(bench: Bench, how: str) -> None:
    """The one that reported the bad step is known, the other is not judged without it."""
    clock = Clock(NOW)
    began = [Event(kind="state", time=NOW, data={"state": "running", "world_size": 2})]

    def train(rank: int, loss: float, steps: range) -> None:
        events = began if steps[0] == 1 else ()
        bench.send({"loss": [loss] * len(steps)}, steps, rank=rank, now=clock.at, events=events)
        judge_all(bench, clock.at)
        clock.at += 1.0

    for begin in range(1, 400, 50):
        for rank in (0, 1):
            train(rank, 3.0 + 0.01 * (begin % 3), range(begin, begin + 50))
    train(0, 9.0, range(401, 421))
    lose(bench, how)
    train(1, 9.0, range(401, 421))
    if how != "compacted":  # the first half of these steps is history by then
        assert [(row["rule"], row["state"]) for row in bench.rows(alert)] == [("loss_spike", "firing")]
    train(0, 9.0, range(421, 441))
    train(1, 9.0, range(421, 441))
    assert [row["rule"] for row in bench.rows(alert)] == ["loss_spike"]


@pytest.mark.sqlite
def test_a_database_of_an_older_version_is_upgraded_and_its_firing_alert_goes_on(tmp_path: Path) -> None:
    (tmp_path / "perfagent.db").write_bytes(lzma.decompress(OLD.read_bytes()))
    bench = Bench(tmp_path)
    try:
        [before] = bench.rows(alert)
        assert (before["rule"], before["state"], before["since_step"]) == ("nonfinite_loss", "firing", 301)
        bench.seq["r-1-0"] = 2
        bench.send({"loss": [math.nan]}, [302])
        judge_all(bench)
        assert [row["id"] for row in bench.rows(alert)] == [before["id"]]
        bench.send({"loss": [2.0] * 60}, range(303, 363))
        judge_all(bench)
        [after] = bench.rows(alert)
        assert (after["id"], after["state"]) == (before["id"], "resolved")
    finally:
        bench.database.close()


@pytest.mark.parametrize("first", ["the new attempt", "the older attempt"])
def test_how_an_older_attempt_ended_is_an_alert_also_when_the_new_one_reported_first(bench: Bench, first: str) -> None:
    """torchrun starts the job again before the last frame of the rank that ran out of memory has come."""
    ended = Event(kind="state", time=NOW, step=20, data={"state": "oom", "reason": "CUDA out of memory"})
    running = Event(kind="state", time=NOW, data={"state": "running", "world_size": 1})
    if first == "the older attempt":
        bench.send({"loss": [2.0] * 20}, range(1, 21), attempt=1)
    bench.send({"loss": [2.0] * 5}, range(1, 6), attempt=2, events=[running])
    bench.send({}, [], attempt=1, events=[ended])
    bench.send({}, [], attempt=1, rank=1, events=[Event(kind="state", time=NOW, step=20, data={"state": "failed"})])
    judge_all(bench)
    assert [(row["rule"], row["state"]) for row in bench.rows(alert)] == [("oom_observed", "resolved")]
    assert [row["event"] for row in bench.rows(delivery)] == ["alert.firing", "alert.resolved"]
    assert bench.engine().verdict("r").rule == "healthy"


@pytest.mark.parametrize("how", HOW)
def test_a_run_that_hangs_goes_on_hanging_when_its_state_is_lost(bench: Bench, how: str) -> None:
    wall = Clock(NOW)
    bench.send({"step_time_s": [1.0] * 10}, range(1, 11))
    wait(bench, wall, 72)
    (fired,) = bench.rows(alert)
    assert (fired["rule"], fired["state"]) == ("hang", "firing")
    lose(bench, how)
    bench.send({"process/rss_bytes": [1e9]}, [10], now=wall.at)
    wait(bench, wall, 72)
    (still,) = bench.rows(alert)
    assert (still["id"], still["state"]) == (fired["id"], "firing")
    assert len(bench.rows(delivery)) == 1
    bench.send({"step_time_s": [1.0]}, [11], now=wall.at)
    wait(bench, wall, 6)
    assert [row["state"] for row in bench.rows(alert)] == ["resolved"]


def wait(bench: Bench, wall: Clock, seconds: float) -> None:
    """A server judges for so long, and is then killed with a fresh checkpoint."""
    engine = bench.engine(clock=wall)
    for _ in range(int(seconds / 3)):
        while engine.run_once():
            pass
        wall.at += 3.0
    engine.run_once()
    engine.checkpoint()


def test_an_alert_that_opened_twice_is_told_of_its_third_time_too(bench: Bench) -> None:
    """The rows say how many times it was open: else the third message would count as the second one, which was sent."""
    fails, heals, now = {"loss": [math.nan]}, {"loss": [2.0] * 60}, NOW
    for begin in (1, 62, 123):
        bench.send(fails, [begin], now=now)
        judge_all(bench, now)
        if begin == 62:
            lose(bench, "compacted")
        now += 900.0
        bench.send(heals, range(begin + 1, begin + 61), now=now)
        judge_all(bench, now)
        now += 300.0
    events = [row["event"] for row in sorted(bench.rows(delivery), key=lambda row: row["created"])]
    assert events == ["alert.firing", "alert.resolved"] * 3
    assert len({row["alert"] for row in bench.rows(delivery)}) == 1
