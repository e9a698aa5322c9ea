"""Checkpoints are written in pieces, also while the engine is behind; and a look for silence costs what is silent."""

from __future__ import annotations

import pytest
from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Event
from perfagent_server.engine import checkpoints, scheduler
from perfagent_server.store.tables import alert, cursor, rule_state, source

RUNNING = Event(kind="state", time=NOW, data={"state": "running", "world_size": 1})


def test_a_checkpoint_is_written_while_the_engine_is_behind(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_BATCH", 10)
    for step in range(1, 101):
        bench.send({"loss": [2.0]}, [step], name=f"run{step % 7}")
    mono = Clock(1000.0)
    engine = bench.engine(monotonic=mono)
    seen: list[int] = []
    run_once = engine.run_once

    def counted() -> int:
        mono.at += 1.0
        judged = run_once()
        seen.append(bench.rows(cursor)[0]["tail_id"] if bench.rows(cursor) else 0)
        return judged

    monkeypatch.setattr(engine, "run_once", counted)
    engine._work()
    assert any(0 < position < 100 for position in seen), f"the cursor stood at {seen} while frames were waiting"


def test_piece_holds_few_runs_and_the_cursor_moves_behind_them(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RUNS_A_PIECE", 3)
    for place in range(10):
        bench.send({"loss": [2.0]}, [1], name=f"run{place}")
    engine = bench.engine()
    engine.run_once()
    written = []
    for _ in range(4):
        assert bench.rows(cursor) == []
        engine._checkpoint_piece()
        written.append(len(bench.rows(rule_state)))
    assert written == [3, 6, 9, 10]
    assert bench.rows(cursor)[0]["tail_id"] == 10


def test_judged_between_two_pieces_is_judged_once_after_a_kill(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "RUNS_A_PIECE", 1)
    engine = bench.engine()
    for step, loss in ((1, 2.0), (2, float("nan"))):
        for name in "ab":
            bench.send({"loss": [loss]}, [step], name=name)
        engine.run_once()
        engine._checkpoint_piece()  # of run a; then of run b, and the cursor
    assert bench.rows(cursor)[0]["tail_id"] == 2
    bench.engine().run_once()
    assert sorted((row["run"], row["since_step"]) for row in bench.rows(alert)) == [("a", 2), ("b", 2)]


@pytest.mark.sql
def test_a_source_that_falls_silent_loads_its_run_alone(bench: Bench) -> None:
    """And none that was lost long ago. Heard since the start, it needs no minute of grace."""
    clock = Clock(NOW)
    engine = bench.engine(clock=clock)

    def fall_silent(*names: str) -> None:
        for name in names:
            bench.send({"loss": [2.0]}, [1], name=name, now=clock.at, events=[RUNNING])
        engine.run_once()
        engine.forget()
        clock.at += 31
        engine.look_for_silence()

    fall_silent(*(f"old{place}" for place in range(30)))
    assert [row["state"] for row in bench.rows(source)] == ["lost"] * 30
    engine.checkpoint()
    fall_silent("new")
    assert ("new", "lost_contact") in bench.told()
    assert list(engine.evaluators.in_memory) == ["new"]


@pytest.mark.sql
def test_lag_of_the_rules_is_counted_and_ingest_waits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_BATCH", 10)
    monkeypatch.setattr(scheduler, "MOST_LAG_FRAMES", 50)
    mono = Clock(1000.0)
    for step in range(1, 101):
        bench.send({"loss": [2.0]}, [step])
    engine = bench.engine(monotonic=mono, clock=Clock(NOW + 60))
    engine.run_once()
    assert (engine.counters["lag_frames"], engine.counters["lag_s"], engine.is_behind) == (90, 60.0, True)
    while engine.run_once():
        mono.at += 1.0
    assert (engine.counters["lag_frames"], engine.is_behind) == (0, False)
    monkeypatch.setattr(scheduler, "_BATCH_BYTES", 1)  # a round takes one large frame
    for step in range(101, 111):
        bench.send({"loss": [2.0]}, [step])
    mono.at += 1.0
    engine.run_once()
    assert engine.counters["lag_frames"] == 9


def test_a_run_whose_state_cannot_be_written_is_rebuilt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not go on from its older one."""
    engine = bench.engine()
    for step in (1, 2):
        bench.send({"loss": [2.0]}, [step])
        engine.run_once()
        if step == 2:
            monkeypatch.setattr(engine.evaluators.in_memory["r"], "snapshot", lambda: 1 / 0)
        engine.checkpoint()
        assert len(bench.rows(rule_state)) == 2 - step
