"""The engine on a real database: exactly one alert whatever is killed, and silence that no clock can fake."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import pytest
from clocks import Clock
from engine_bench import NOW, Bench

from perfagent.wire import Alert, Event
from perfagent_server.database import StorageError
from perfagent_server.engine.scheduler import Engine
from perfagent_server.store.shards import SHARDS
from perfagent_server.store.tables import alert, cursor, delivery, rule_state, run, source

NAN = {"loss": [1.0, math.nan]}


def said(state: str, **data: object) -> Event:
    return Event(kind="state", time=NOW, data={"state": state, **data})


def events(bench: Bench) -> list[str]:
    return sorted(row["event"].removeprefix("alert.") for row in bench.rows(delivery))


def fails_at(count: int) -> Callable[[str], str]:
    """A link that fails once, when it is made for so many runs."""
    linked: dict[str, None] = {}

    def link(name: str) -> str:
        if name not in linked:
            linked[name] = None
            if len(linked) == count:
                raise StorageError(f"the disk is full while the delivery of {name} is written")
        return name

    return link


@pytest.mark.sql
def test_alert_deliveries_and_snapshot_are_one_transaction(bench: Bench) -> None:
    """One that fails is tried again, also by the next server; each alert is told once."""
    bench.send(NAN, [1, 2])  # acked
    engine = bench.engine(link=fails_at(1))
    with pytest.raises(StorageError):
        engine.run_once()
    assert bench.rows(alert) == bench.rows(delivery) == bench.rows(rule_state) == []
    for one in (engine, bench.engine(), bench.engine()):
        one.run_once()
        assert (bench.told(), events(bench)) == ([("r", "nonfinite_loss")], ["firing"])


def test_a_storm_of_alerts_is_written_fifty_runs_at_a_time(bench: Bench) -> None:
    for number in range(120):
        bench.send(NAN, [1, 2], name=f"r{number:03}")
    with pytest.raises(StorageError):
        bench.engine(link=fails_at(71)).run_once()
    assert len(bench.rows(alert)) == len(bench.rows(delivery)) == 50
    bench.engine().run_once()
    assert len(bench.rows(alert)) == len(bench.rows(delivery)) == 120


def test_the_cursor_follows_so_that_the_tail_can_be_compacted(bench: Bench) -> None:
    engine = bench.engine()
    bench.send({"loss": [1.0] * 10}, range(1, 11))
    engine.run_once()
    for _ in range(2):
        engine.checkpoint()
        assert {row["name"]: row["tail_id"] for row in bench.rows(cursor)} == {f"rules/{shard}": 1 for shard in SHARDS}
        assert (len(bench.rows(rule_state)), engine.counters["checkpoints"]) == (1, 1)


def test_the_thread_is_woken_and_publishes_the_alert(bench: Bench) -> None:
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
        assert came.wait(20)
    finally:
        engine.stop()
    assert bench.rows(cursor)[0]["tail_id"] == 1


def test_deleted_run_is_forgotten_and_its_frames_passed_over(bench: Bench) -> None:
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
    bench.send({}, [], events=[said("finished")])
    first = bench.engine()
    first.run_once()
    first.checkpoint()
    second = bench.engine()
    assert second.verdict("r").rule == first.verdict("r").rule == "data_bound"
    assert [found.rule for found in second.findings("r")] == ["data_bound"]
    assert second.verdict("no such run").rule == "healthy"


def test_an_alert_is_resolved_by_hand_once_and_told_to_be_over(bench: Bench) -> None:
    engine = bench.engine()
    bench.send(NAN, [1, 2])
    engine.run_once()
    [row] = bench.rows(alert)
    assert [engine.resolve("r", row["id"], "by hand") for _ in range(2)] == [True, False]
    assert (bench.rows(alert)[0]["state"], events(bench)) == ("resolved", ["firing", "resolved"])


@pytest.mark.parametrize("end", ["killed", "failed"])
def test_all_places_name_the_last_step_of_a_broken_off_run(bench: Bench, end: str) -> None:
    """The loss of a step is known before the step is over."""
    engine = bench.engine(clock=Clock(NOW))
    steps = range(1, 41)
    bench.send({"loss": [1.0] * 40, "step_time_s": [0.1] * 40}, steps, events=[said("running")])
    bench.send({"loss": [1.0]}, [41])
    bench.send({}, [], events=[said(end, reason="gone")])
    while engine.run_once():
        pass
    (alerted,) = bench.rows(alert)
    assert (bench.rows(run)[0]["step"], "after step 40" in alerted["title"]) == (40, True)
    for one in (engine, bench.engine(clock=Clock(NOW))):  # in memory, and from what is stored
        assert (one.verdict("r").title, one.verdict("r").since_step) == (alerted["title"], 40)


# --- silence ----------------------------------------------------------------------------------------------------------


class Silent:
    """A run, its engine, and two clocks. name: "http-a" is a source of POST /log, which has no agent."""

    def __init__(self, bench: Bench, name: str = "r", *, began_s: float = 100.0) -> None:
        self.bench, self.name, self.lost = bench, name, list[str]()
        self.wall, self.mono = Clock(NOW), Clock(1000.0)
        self.restart()
        self.mono.at += began_s  # the first minute is over
        self.step = 0

    def restart(self) -> None:
        self.engine: Engine = self.bench.engine(clock=self.wall, monotonic=self.mono, on_states=self.lost.extend)

    def send(self, *, first: bool = False, sent: float | None = None) -> None:
        self.step += 1
        told = [said("running")] if first else []
        self.bench.send({"loss": [1.0]}, [self.step], name=self.name, now=self.wall.at, events=told, sent=sent)
        self.engine.run_once()

    def wait(self, seconds: float) -> tuple[str, list[str]]:
        """The state of the run after so long, and those of its alerts of silence."""
        self.wall.at += seconds
        self.mono.at += seconds
        self.engine.run_once()
        self.engine.look_for_silence()
        return self.now()

    def now(self) -> tuple[str, list[str]]:
        rows = [row["state"] for row in self.bench.rows(alert) if row["rule"] == "lost_contact"]
        return self.bench.rows(run)[0]["state"], rows


def test_silence_of_thirty_seconds_is_reversible_lost_contact(bench: Bench) -> None:
    job = Silent(bench)
    job.send(first=True)
    assert job.wait(0) == job.wait(29) == ("running", [])
    assert job.wait(2) == ("lost", ["firing"])
    assert (bench.rows(source)[0]["state"], job.engine.verdict("r").rule) == ("lost", "lost_contact")
    job.send()
    assert job.wait(0) == ("running", ["resolved"])


@pytest.mark.parametrize("restarted", [False, True])
def test_the_spool_of_a_dead_process_is_no_sign_of_life(bench: Bench, restarted: bool) -> None:
    job = Silent(bench)
    job.send(first=True, sent=NOW)
    assert job.wait(40) == ("lost", ["firing"])
    job.wait(7200)
    if restarted:
        job.restart()
    job.send(sent=NOW + 1)
    for _ in range(12):
        assert job.wait(10) == ("lost", ["firing"])
    assert (events(bench), job.engine.verdict("r").rule) == (["firing"], "lost_contact")
    job.send(sent=job.wall.at)  # a living process sends its spool first, too
    assert job.now() == ("running", ["resolved"])


def test_nobody_is_lost_in_the_first_minute_after_a_start(bench: Bench) -> None:
    job = Silent(bench)
    job.send(first=True)
    job.wall.at += 86400  # the server was down for a day
    job.restart()
    for _ in range(5):
        assert job.wait(11) == ("running", [])
    assert job.wait(11) == ("lost", ["firing"])


@pytest.mark.fault
@pytest.mark.parametrize("jump", [86400.0, -86400.0])
def test_s10_a_jump_of_the_wall_clock_is_no_silence(bench: Bench, jump: float) -> None:
    job = Silent(bench)
    for step in range(1, 20):
        job.send(first=step == 1)
        job.wall.at += jump if step == 10 else 0
        assert job.wait(5) == ("running", [])


def test_program_without_agent_is_lost_after_ten_longest_pauses(bench: Bench) -> None:
    job = Silent(bench, "http-a", began_s=0)
    for _ in range(12):
        if job.step:
            job.wait(30)
        job.send()
    assert job.wait(299) == ("running", [])
    assert job.wait(2) == ("lost", []), "most such programs have simply ended"
    assert job.lost == ["http-a"]
    found = job.engine.verdict("http-a")
    assert (found.rule, found.severity, found.since_step) == ("lost_contact", "info", 12)
    assert (found.cause, found.evidence["step"], "state" in found.fix) == ("no agent", 12, True)
    job.send()
    assert job.wait(0) == ("running", [])
    assert job.engine.verdict("http-a").message == "Nothing holds this run back: step 13, loss 1 (from 1)."


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_program_whose_habit_is_not_known_has_an_hour(bench: Bench, is_restarted: bool) -> None:
    job = Silent(bench, "http-a")
    job.send()
    if is_restarted:
        job.wait(1800)
        job.restart()
    assert job.wait(0) == job.wait(3599) == ("running", [])
    assert job.wait(2) == ("lost", [])
