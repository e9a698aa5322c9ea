"""Checkpoints are written in pieces, also while the engine is behind; and a look for silence costs what is silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Event
from perfagent_server.engine import checkpoints, scheduler
from perfagent_server.store.tables import alert, cursor, rule_state, source

RUNNING = Event(kind="state", time=NOW, data={"state": "running", "world_size": 1})


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


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


def test_a_piece_holds_a_few_runs_and_the_cursor_moves_behind_the_last(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_what_is_judged_between_two_pieces_is_judged_once_after_a_kill(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "RUNS_A_PIECE", 1)
    for name in "ab":
        bench.send({"loss": [2.0]}, [1], name=name)
    engine = bench.engine()
    engine.run_once()
    engine._checkpoint_piece()  # of run a
    for name in "ab":
        bench.send({"loss": [float("nan")]}, [2], name=name)
    engine.run_once()
    engine._checkpoint_piece()  # of run b, and the cursor
    assert bench.rows(cursor)[0]["tail_id"] == 2
    again = bench.engine()
    again.run_once()
    assert sorted((row["run"], row["since_step"]) for row in bench.rows(alert)) == [("a", 2), ("b", 2)]


@pytest.mark.sql
def test_a_source_that_falls_silent_loads_its_run_and_none_that_was_lost_long_ago(bench: Bench) -> None:
    wall, mono = Clock(NOW), Clock(1000.0)
    engine = bench.engine(clock=wall, monotonic=mono)
    for place in range(30):
        bench.send({"loss": [2.0]}, [1], name=f"old{place}", now=wall.at, events=[RUNNING])
    engine.run_once()
    for clock in (wall, mono):
        clock.at += 40
    engine.look_for_silence()
    assert sum(row["state"] == "lost" for row in bench.rows(source)) == 30
    engine.checkpoint()
    bench.send({"loss": [2.0]}, [1], name="new", now=wall.at, events=[RUNNING])
    engine.run_once()
    engine.forget()
    for clock in (wall, mono):
        clock.at += 40
    engine.look_for_silence()
    assert [row["run"] for row in bench.rows(alert) if row["state"] == "firing" and row["run"] == "new"] == ["new"]
    assert list(engine.evaluators.in_memory) == ["new"]


def test_a_source_that_was_heard_since_the_start_needs_no_minute_of_grace(bench: Bench) -> None:
    wall, mono = Clock(NOW), Clock(1000.0)
    engine = bench.engine(clock=wall, monotonic=mono)
    bench.send({"loss": [2.0]}, [1], now=wall.at, events=[RUNNING])
    engine.run_once()
    for clock in (wall, mono):
        clock.at += 31
    engine.look_for_silence()
    assert [row["rule"] for row in bench.rows(alert)] == ["lost_contact"]


@pytest.mark.sql
def test_how_far_the_rules_are_behind_is_counted_and_ingest_is_asked_to_wait(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_BATCH", 10)
    monkeypatch.setattr(scheduler, "MOST_LAG_FRAMES", 50)
    mono, wall = Clock(1000.0), Clock(NOW + 60)
    for step in range(1, 101):
        bench.send({"loss": [2.0]}, [step])
    engine = bench.engine(monotonic=mono, clock=wall)
    engine.run_once()
    assert (engine.counters["lag_frames"], engine.counters["lag_s"]) == (90, 60.0)
    assert engine.is_behind
    while engine.run_once():
        mono.at += 1.0
    assert engine.counters["lag_frames"] == 0
    assert not engine.is_behind


def test_large_frames_that_wait_are_counted_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_BATCH_BYTES", 1)  # a round takes one frame
    for step in range(1, 11):
        bench.send({"loss": [2.0]}, [step])
    engine = bench.engine()
    engine.run_once()
    assert engine.counters["lag_frames"] == 9


def test_a_run_whose_state_cannot_be_written_is_rebuilt_and_does_not_go_on_from_its_older_one(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench.engine()
    bench.send({"loss": [2.0]}, [1])
    engine.run_once()
    engine.checkpoint()
    assert len(bench.rows(rule_state)) == 1
    bench.send({"loss": [2.0]}, [2])
    engine.run_once()
    monkeypatch.setattr(engine.evaluators.in_memory["r"], "snapshot", lambda: 1 / 0)
    engine.checkpoint()
    assert bench.rows(rule_state) == []


def test_silence_found_while_the_rules_are_behind_stops_no_checkpoint(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_BATCH", 1)
    mono = Clock(1000.0)
    engine = bench.engine(monotonic=mono, checkpoint_s=0.0)
    bench.send({"loss": [2.0]}, [1], events=[Event(kind="state", time=NOW, data={"state": "running"})])
    engine.run_once()
    mono.at += 3600.0
    for step in range(1, 11):
        bench.send({"loss": [2.0]}, [step], name="busy")
    engine.look_for_silence()
    assert engine.counters["checkpoints"] > 0
