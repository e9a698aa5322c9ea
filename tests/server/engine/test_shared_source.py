"""A trainer and the watcher of `perfagent run` speak as one source. A trainer that falls silent is not taken for well
because its watcher goes on."""

from __future__ import annotations

from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Event, Frame
from perfagent_server.engine.scheduler import Engine
from perfagent_server.store.tables import alert, run

OF_THE_WATCHER = 2**40
"""What it counts its own frames from."""


def watcher_says(bench: Bench, number: int, now: float, *, is_first: bool) -> None:
    """A sign of life, as launch/watcher.py sends it: the state first, then nothing."""
    state = Event(kind="state", time=now, data={"state": "running", "watcher": True, "world_size": 1})
    made = Frame(
        project="p", run="r", source="r-1-0", attempt=1, rank=0, seq=OF_THE_WATCHER + number, groups=[],
        events=[state] if is_first else [],
    )  # fmt: skip
    bench.database.write(lambda connection: bench.store.append_in(connection, [made], now))


def pass_time(bench: Bench, engine: Engine, clock: Clock, seconds: float, *, is_watched: bool = True) -> None:
    """With looks at everything that time may change, and a sign of life of the watcher every ten seconds."""
    for second in range(2, int(seconds) + 1, 2):
        clock.at += 2
        if is_watched and second % 10 == 0:
            watcher_says(bench, int(clock.at - NOW), clock.at, is_first=second == 10)
        engine.run_once()
        engine.look_for_silence()


def told(bench: Bench) -> list[tuple[str, str]]:
    return [(row["rule"], row["state"]) for row in bench.rows(alert)]


def test_a_trainer_that_falls_silent_beside_its_watcher_hangs(bench: Bench) -> None:
    clock = Clock(NOW)
    engine = bench.engine(clock=clock)
    for step in range(1, 61):
        clock.at += 1
        bench.send({"loss": [2.0], "step_time_s": [1.0]}, [step], now=clock.at)
        engine.run_once()
    pass_time(bench, engine, clock, 30)
    assert told(bench) == []
    pass_time(bench, engine, clock, 60)
    assert told(bench) == [("hang", "firing")]
    assert engine.verdict("r").rule == "hang"
    pass_time(bench, engine, clock, 60, is_watched=False)
    assert told(bench) == [("hang", "firing"), ("lost_contact", "firing")]
    assert [row["state"] for row in bench.rows(run)] == ["lost"]


def test_trainer_silent_before_its_first_step_is_slow_to_begin(bench: Bench) -> None:
    clock = Clock(NOW)
    engine = bench.engine(clock=clock)
    running = Event(kind="state", time=NOW, data={"state": "running", "world_size": 1})
    bench.send({"process/rss_bytes": [1e9]}, [0], now=clock.at, events=[running])
    engine.run_once()
    pass_time(bench, engine, clock, 60)
    assert told(bench) == []
    pass_time(bench, engine, clock, 1300)
    assert told(bench) == [("init_slow", "firing")]
