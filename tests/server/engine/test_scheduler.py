"""The engine on a real database: exactly one alert whatever is killed, and silence that no clock can fake."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import engine_bench
import pytest
from clocks import Clock
from engine_bench import NOW, Bench
from statements import sqlite_calls

from perfagent.wire import Alert, Event
from perfagent_server.database import StorageError
from perfagent_server.engine.scheduler import Engine
from perfagent_server.store.shards import SHARDS
from perfagent_server.store.tables import alert, cursor, delivery, rule_state, run, source


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.database.close()


def told(state: str, **data: object) -> Event:
    return Event(kind="state", time=NOW, data={"state": state, **data})


def test_what_was_acked_but_not_judged_fires_once_after_a_restart(bench: Bench) -> None:
    bench.send({"loss": [1.0, math.nan]}, [1, 2])  # acked; the server dies before it judges
    bench.engine().run_once()
    bench.engine().run_once()
    assert [row["rule"] for row in bench.rows(alert)] == ["nonfinite_loss"]
    assert [row["event"] for row in bench.rows(delivery)] == ["alert.firing"]


@pytest.mark.sql
def test_alert_deliveries_and_snapshot_are_one_transaction(bench: Bench) -> None:
    bench.send({"loss": [1.0, math.nan]}, [1, 2])

    def fails(name: str) -> str:
        raise StorageError(f"the disk is gone while the delivery of {name} is written")

    with pytest.raises(StorageError):
        bench.engine(link=fails).run_once()
    assert bench.rows(alert) == bench.rows(delivery) == bench.rows(rule_state) == []
    bench.engine().run_once()
    assert len(bench.rows(alert)) == len(bench.rows(delivery)) == 1


def test_a_commit_that_fails_once_is_tried_again(bench: Bench) -> None:
    bench.send({"loss": [1.0, math.nan]}, [1, 2])
    failing = [True]

    def link(name: str) -> str:
        if failing:
            failing.clear()
            raise StorageError("once")
        return name

    engine = bench.engine(link=link)
    with pytest.raises(StorageError):
        engine.run_once()
    engine.run_once()
    assert len(bench.rows(alert)) == len(bench.rows(delivery)) == 1


def test_a_storm_of_alerts_is_written_fifty_runs_at_a_time(bench: Bench) -> None:
    for number in range(120):
        bench.send({"loss": [1.0, math.nan]}, [1, 2], name=f"r{number:03}")
    linked: set[str] = set()

    def link(name: str) -> str:
        linked.add(name)
        if len(linked) > 70:
            raise StorageError("the disk is full for a moment")
        return name

    with pytest.raises(StorageError):
        bench.engine(link=link).run_once()
    assert len(bench.rows(alert)) == len(bench.rows(delivery)) == 50
    bench.engine().run_once()
    assert len(bench.rows(alert)) == len(bench.rows(delivery)) == 120


def test_silences_are_read_once_for_all_alerts_of_a_job(bench: Bench) -> None:
    for number in range(20):
        bench.send({"loss": [1.0, math.nan]}, [1, 2], name=f"r{number:03}")
    said: list[str] = []
    stop = sqlite_calls(bench.database, said)
    bench.engine().run_once()
    stop()
    assert sum("FROM silence" in one for one in said) == 1


@pytest.mark.parametrize("seed", range(3))
def test_engines_that_die_at_any_moment_come_to_the_alerts_of_one_that_lived(
    bench: Bench, tmp_path: Path, seed: int
) -> None:
    draw = Random(seed)
    other = Bench(tmp_path / "other")
    try:
        living, dying = other.engine(), bench.engine()
        step = 1
        while step < 900:
            rows = draw.randint(1, 60)
            steps = range(step, step + rows)
            columns = {
                "loss": [
                    math.nan if at in (650, 651) else 3.0 + draw.gauss(0, 0.02) + (400 <= at < 440) for at in steps
                ],
                "step_time_s": [0.1] * rows,
                "phase/data_s": [0.05 if at > 750 else 0.0 for at in steps],
            }
            for one in (bench, other):
                one.send(columns, steps)
            step += rows
            living.run_once()
            if draw.random() < 0.5:
                dying.run_once()
            if draw.random() < 0.2:
                dying.checkpoint()
            if draw.random() < 0.3:
                dying = bench.engine()
        living.run_once()
        bench.engine().run_once()
        facts = [
            sorted(
                (row["id"], row["rule"], row["state"], row["since_step"])
                for row in one.rows(alert)
                if row["rule"] in ("loss_spike", "nonfinite_loss", "data_bound")  # not what the clock finds
            )
            for one in (bench, other)
        ]
        assert facts[0] == facts[1]
        assert {fact[1] for fact in facts[0]} == {"loss_spike", "nonfinite_loss", "data_bound"}
        ids = {fact[0] for fact in facts[0]}
        sent = [
            sorted((row["alert"], row["event"]) for row in one.rows(delivery) if row["alert"] in ids)
            for one in (bench, other)
        ]
        assert sent[0] == sent[1]
    finally:
        other.database.close()


KILLED = """
import math, os, signal, sys
from pathlib import Path
sys.path[:0] = [{here!r}]
from engine_bench import Bench
bench = Bench(Path({folder!r}))
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
bench.send({{"loss": [1.0, math.nan], "grad/norm": [1.0, math.nan]}}, [1, 2])
if {moment!r} == "after the ack":
    die()
engine = bench.engine(
    link=die if {moment!r} == "inside the transaction" else str,
    on_deliveries=die if {moment!r} == "after the commit" else None,
)
engine.run_once()
die()
"""


@pytest.mark.parametrize("moment", ["after the ack", "inside the transaction", "after the commit"])
def test_a_server_killed_at_any_point_of_judging_a_nan_tells_it_once(tmp_path: Path, moment: str) -> None:
    script = KILLED.format(here=str(Path(engine_bench.__file__).parent), folder=str(tmp_path), moment=moment)
    ended = subprocess.run(
        [sys.executable, "-c", script], check=False, env={**os.environ, "PYTHONPATH": ""}, capture_output=True
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    bench = Bench(tmp_path)
    try:
        bench.engine().run_once()
        assert [row["rule"] for row in bench.rows(alert)] == ["nonfinite_loss"]
        assert [row["event"] for row in bench.rows(delivery)] == ["alert.firing"]
    finally:
        bench.database.close()


def test_the_cursor_follows_so_that_the_tail_can_be_compacted(bench: Bench) -> None:
    engine = bench.engine()
    bench.send({"loss": [1.0] * 10}, range(1, 11))
    engine.run_once()
    engine.checkpoint()
    found = {row["name"]: row["tail_id"] for row in bench.rows(cursor)}
    assert found == {f"rules/{shard}": 1 for shard in SHARDS}
    assert len(bench.rows(rule_state)) == 1
    engine.checkpoint()
    assert engine.counters["checkpoints"] == 1


def test_the_thread_is_woken_and_publishes_the_alert(bench: Bench) -> None:
    import threading

    came = threading.Event()

    class Hub:
        def publish_alert(self, alert: Alert) -> None:
            assert alert.rule == "nonfinite_loss"
            came.set()

    engine = Engine(bench.database, bench.store, Hub())
    engine.start()
    try:
        bench.send({"loss": [math.nan]}, [1])
        engine.wake()
        assert came.wait(10)
    finally:
        engine.stop()
    assert bench.rows(cursor)[0]["tail_id"] == 1


def test_a_deleted_run_is_forgotten_and_its_frames_are_passed_over(bench: Bench) -> None:
    engine = bench.engine()
    bench.send({"loss": [1.0]}, [1])
    engine.run_once()
    bench.send({"loss": [math.nan]}, [2])
    bench.store.delete("r")
    engine.drop("r")
    engine.run_once()
    engine.checkpoint()
    assert bench.rows(alert) == bench.rows(run) == bench.rows(rule_state) == []


def test_verdict_and_findings_survive_a_restart(bench: Bench) -> None:
    bench.send({"step_time_s": [0.1] * 60, "phase/data_s": [0.06] * 60}, range(1, 61))
    bench.send({}, [], events=[told("finished")])
    first = bench.engine()
    first.run_once()
    first.checkpoint()
    second = bench.engine()
    assert second.verdict("r").rule == first.verdict("r").rule == "data_bound"
    assert [found.rule for found in second.findings("r")] == ["data_bound"]
    assert second.verdict("no such run").rule == "healthy"


def test_an_alert_resolved_by_hand_stays_resolved_within_its_cool_down(bench: Bench) -> None:
    engine = bench.engine()
    bench.send({"loss": [1.0, math.nan]}, [1, 2])
    engine.run_once()
    [row] = bench.rows(alert)
    assert engine.resolve("r", row["id"], "by hand")
    assert not engine.resolve("r", row["id"], "by hand")
    assert bench.rows(alert)[0]["state"] == "resolved"
    assert sorted(one["event"] for one in bench.rows(delivery)) == ["alert.firing", "alert.resolved"]


def test_a_muted_alert_tells_only_that_it_is_over(bench: Bench) -> None:
    engine = bench.engine(clock=Clock(NOW))
    bench.send({"loss": [1.0, math.nan]}, [1, 2])
    engine.run_once()
    bench.database.write(lambda connection: connection.execute(alert.update().values(muted_until=NOW + 3600)))
    bench.send({"loss": [1.0] * 60}, range(3, 63))
    engine.run_once()
    assert bench.rows(alert)[0]["state"] == "resolved"
    assert [one["event"] for one in bench.rows(delivery)] == ["alert.firing", "alert.resolved"]


# --- silence ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_all_places_name_the_last_completed_step_of_a_run_that_broke_off(bench: Bench, end: str) -> None:
    """The loss of a step is known before the step is over."""
    engine = bench.engine(clock=Clock(NOW))
    steps = range(1, 41)
    bench.send({"loss": [1.0] * 40, "step_time_s": [0.1] * 40}, steps, events=[told("running")])
    bench.send({"loss": [1.0]}, [41])
    bench.send({}, [], events=[told(end, reason="gone")])
    while engine.run_once():
        pass
    assert bench.rows(run)[0]["step"] == 40
    (alerted,) = bench.rows(alert)
    assert "after step 40" in alerted["title"]
    for one in (engine, bench.engine(clock=Clock(NOW))):  # in memory, and from what is stored
        assert one.verdict("r").title == alerted["title"]
        assert one.verdict("r").since_step == 40


def _silent(bench: Bench) -> list[str]:
    return [row["state"] for row in bench.rows(alert) if row["rule"] == "lost_contact"]


def test_silence_of_thirty_seconds_is_lost_contact_and_reversible(bench: Bench) -> None:
    wall, mono = Clock(NOW), Clock(1000.0)
    engine = bench.engine(clock=wall, monotonic=mono)
    mono.at += 100
    bench.send({"loss": [1.0]}, [1], events=[told("running")])
    engine.run_once()
    engine.look_for_silence()
    for clock in (wall, mono):
        clock.at += 29
    engine.look_for_silence()
    assert _silent(bench) == []
    for clock in (wall, mono):
        clock.at += 2
    engine.look_for_silence()
    assert _silent(bench) == ["firing"]
    assert bench.rows(source)[0]["state"] == bench.rows(run)[0]["state"] == "lost"
    assert engine.verdict("r").rule == "lost_contact"
    bench.send({"loss": [1.0]}, [2], now=wall.at)
    engine.run_once()
    engine.look_for_silence()
    assert _silent(bench) == ["resolved"]
    assert bench.rows(run)[0]["state"] == "running"


def _fallen_silent(bench: Bench) -> tuple[Clock, Clock, Engine]:
    wall, mono = Clock(NOW), Clock(1000.0)
    engine = bench.engine(clock=wall, monotonic=mono)
    bench.send({"loss": [1.0]}, [1], events=[told("running")], sent=NOW)
    engine.run_once()
    for _ in range(12):
        engine.look_for_silence()
        wall.at, mono.at = wall.at + 10, mono.at + 10
    assert (_silent(bench), _states(bench)) == (["firing"], ["lost"])
    return wall, mono, engine


@pytest.mark.parametrize("restarted", [False, True])
def test_the_spool_of_a_dead_process_is_no_sign_of_life(bench: Bench, restarted: bool) -> None:
    wall, mono, engine = _fallen_silent(bench)
    wall.at, mono.at = wall.at + 7200, mono.at + 7200
    if restarted:
        engine = bench.engine(clock=wall, monotonic=mono)
    bench.send({"loss": [1.0, 1.0]}, [2, 3], now=wall.at, sent=NOW + 1)
    for _ in range(12):
        engine.run_once()
        engine.look_for_silence()
        wall.at, mono.at = wall.at + 10, mono.at + 10
    assert (_silent(bench), _states(bench)) == (["firing"], ["lost"])
    assert [row["event"] for row in bench.rows(delivery)] == ["alert.firing"]
    assert engine.verdict("r").rule == "lost_contact"


def test_a_spool_that_is_sent_on_by_a_living_process_is_followed_by_a_sign_of_life(bench: Bench) -> None:
    wall, _, engine = _fallen_silent(bench)
    bench.send({"loss": [1.0]}, [2], now=wall.at, sent=NOW - 600)
    engine.run_once()
    assert _silent(bench) == ["firing"]
    bench.send({"loss": [1.0]}, [3], now=wall.at, sent=wall.at)
    engine.run_once()
    assert (_silent(bench), _states(bench)) == (["resolved"], ["running"])


def test_nobody_is_lost_in_the_first_minute_after_a_start(bench: Bench) -> None:
    wall, mono = Clock(NOW), Clock(1000.0)
    bench.send({"loss": [1.0]}, [1], events=[told("running")])
    wall.at += 86400  # the server was down for a day
    engine = bench.engine(clock=wall, monotonic=mono)
    for _ in range(5):
        engine.run_once()
        engine.look_for_silence()
        for clock in (wall, mono):
            clock.at += 11
    assert _silent(bench) == []
    for clock in (wall, mono):
        clock.at += 11
    engine.look_for_silence()
    assert _silent(bench) == ["firing"]


@pytest.mark.fault
@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_s10_a_jump_of_the_wall_clock_is_no_silence(bench: Bench, jump: float) -> None:
    wall, mono = Clock(NOW), Clock(1000.0)
    engine = bench.engine(clock=wall, monotonic=mono)
    mono.at += 100
    for step in range(1, 20):
        bench.send({"loss": [1.0]}, [step], now=wall.at, events=[told("running")] if step == 1 else [])
        engine.run_once()
        engine.look_for_silence()
        wall.at += 5 + (jump if step == 10 else 0)
        mono.at += 5
    assert _silent(bench) == []


def test_a_program_that_only_logs_over_http_is_never_lost(bench: Bench) -> None:
    wall, mono = Clock(NOW), Clock(1000.0)
    engine = bench.engine(clock=wall, monotonic=mono)
    bench.send({"loss": [1.0]}, [1], name="http-a")  # a source of POST /log
    engine.run_once()
    mono.at += 1000
    engine.look_for_silence()
    assert _silent(bench) == []


def _states(bench: Bench) -> list[str]:
    return [row["state"] for row in bench.rows(run)]


def test_the_verdict_of_a_silent_program_names_its_open_alert_too(bench: Bench) -> None:
    mono = Clock(1000.0)
    engine = bench.engine(monotonic=mono)
    for level, title in (("info", "note"), ("warning", "disk"), ("critical", "reward fell"), ("warning", "queue")):
        said = Event(kind="alert", time=NOW, step=7, data={"title": title, "text": "look", "level": level})
        bench.send({"loss": [1.0]}, [7], name="http-a", events=[said])
    engine.run_once()
    mono.at += 3601
    engine.look_for_silence()
    assert _states(bench) == ["lost"]
    told = engine.verdict("http-a")
    assert (told.rule, told.severity) == ("lost_contact", "info")
    assert "went silent" in told.title
    for words in (told.title, told.message):
        assert "reward fell" in words
        assert "critical" in words
        assert "2 more" in words
        assert "note" not in words


def test_a_program_without_an_agent_is_lost_after_ten_times_its_longest_pause_and_comes_back(bench: Bench) -> None:
    mono = Clock(1000.0)
    lost: list[str] = []
    engine = bench.engine(monotonic=mono, on_states=lost.extend)
    for step in range(1, 13):
        mono.at += 30
        bench.send({"loss": [1.0]}, [step], name="http-a", now=NOW + step)
        engine.run_once()
    mono.at += 299
    engine.look_for_silence()
    assert _states(bench) == ["running"]
    mono.at += 2
    engine.look_for_silence()
    assert (_states(bench), lost) == (["lost"], ["http-a"])
    assert _silent(bench) == []  # most such programs have simply ended
    told = engine.verdict("http-a")
    assert (told.rule, told.severity, told.since_step) == ("lost_contact", "info", 12)
    assert told.message == "This run went silent after step 12, and did not say that it ended."
    bench.send({"loss": [1.0]}, [13], name="http-a", now=NOW + 700)
    engine.run_once()
    assert _states(bench) == ["running"]
    assert engine.verdict("http-a").message == "Nothing holds this run back: step 13, loss 1 (from 1)."


def test_a_program_without_an_agent_whose_habit_is_not_known_has_an_hour(bench: Bench) -> None:
    mono = Clock(1000.0)
    engine = bench.engine(monotonic=mono)
    mono.at += 100
    bench.send({"loss": [1.0]}, [1], name="http-a")
    engine.run_once()
    engine.look_for_silence()
    mono.at += 3599
    engine.look_for_silence()
    assert _states(bench) == ["running"]
    mono.at += 2
    engine.look_for_silence()
    assert _states(bench) == ["lost"]


def test_one_left_by_an_earlier_server_is_lost_an_hour_after_this_one_began(bench: Bench) -> None:
    bench.send({"loss": [1.0]}, [1], name="http-a")
    mono = Clock(1000.0)
    engine = bench.engine(monotonic=mono)
    engine.run_once()
    engine.look_for_silence()
    mono.at += 3601
    engine.look_for_silence()
    assert _states(bench) == ["lost"]
