"""One run that the rules cannot load or judge is set aside, is shown as such, and holds up nobody."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import pytest
from clocks import Clock
from engine_bench import NOW, Bench
from sqlalchemy import text, update

from perfagent.wire import Event
from perfagent_server.engine.rule_settings import RULES_FILE, RuleSettings
from perfagent_server.engine.scheduler import Engine, default_plan
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.plan import Columns, Plan
from perfagent_server.security.keys import Keys
from perfagent_server.store.retention import Policies, RetentionPolicy, stored_policies
from perfagent_server.store.tables import (
    alert,
    api_key,
    cursor,
    retention_setting,
    rule_setting,
    rule_state,
    run,
    tail,
)  # fmt: skip
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor

NO_STATE = Event(kind="state", time=NOW, data={"state": []})


def send_poison(bench: Bench) -> None:
    """A frame of a run whose first frame was lost: its processes are looked up in the tables."""
    bench.seq["odd-1-0"] = 1
    bench.send({"loss": [2.0]}, [1], name="odd", events=[NO_STATE])


def send_nan(bench: Bench, name: str = "sick", step: int = 2) -> None:
    bench.send({"loss": [2.0, math.nan]}, [step - 1, step], name=name)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_state_that_is_a_list_costs_no_run_its_alert(bench: Bench, is_restarted: bool) -> None:
    """Nor its own run, also where a new version of the rules judges its frames again."""
    engine = bench.engine()
    send_poison(bench)
    bench.send({"loss": [2.0]}, [2], name="odd", events=[NO_STATE])
    if is_restarted:
        engine.run_once()
        engine.checkpoint()
        bench.write(update(rule_state).values(version=0))
        engine = bench.engine()
    odd = [NO_STATE, Event(kind="state", time=NOW, data={"state": {"a": 1}}), Event(kind="finding", time=NOW, data={})]
    bench.send({"loss": [math.nan]}, [3], name="odd", events=odd)
    send_nan(bench)
    engine.run_once()
    engine.run_once()
    assert bench.told() == [("odd", "nonfinite_loss"), ("sick", "nonfinite_loss")]
    assert engine.verdict("odd").rule == "nonfinite_loss"


class Breakable:
    """Rules of which those of one project cannot be made."""

    is_broken = True
    error: Exception = LookupError("no such threshold")

    def __call__(self, project: str, off: Sequence[str]) -> Plan:
        if self.is_broken:
            raise self.error
        return default_plan(project, off)


def engine_of(bench: Bench, plans: Breakable, clock: Clock) -> Engine:
    return bench.engine(
        plan_of=lambda _project, off, _tags: plans("", off) if "broken" in off else default_plan("", ()), clock=clock
    )


def break_run(bench: Bench, name: str = "r") -> None:
    bench.write(update(run).where(run.c.id == name).values(rules_off=json.dumps(["broken"])))


def broken(bench: Bench, plans: Breakable, clock: Clock) -> Engine:
    """An engine that could not load the run r."""
    bench.send({"loss": [2.0]}, [1])
    break_run(bench)
    engine = engine_of(bench, plans, clock)
    engine.run_once()
    return engine


@pytest.mark.parametrize("error", [LookupError("no threshold"), MemoryError(), OSError(75, "Value too large")])
def test_a_run_that_cannot_be_loaded_is_shown_and_judged_later(bench: Bench, error: Exception) -> None:
    plans, clock = Breakable(), Clock(NOW)
    plans.error = error
    engine = broken(bench, plans, clock)
    send_nan(bench)
    engine.run_once()
    assert bench.told() == [("sick", "nonfinite_loss")]
    shown = engine.verdict("r")
    assert (shown.rule, "; trying again at 22:13 UTC" in shown.message) == ("rules_stopped", True)
    assert type(error).__name__ in shown.message
    assert [found.rule for found in engine.findings("r")] == ["rules_stopped"]
    assert engine.counters["set_aside"] == 1
    assert [one["run"] for one in engine.aside.shown()] == ["r"]
    bench.send({"loss": [math.nan]}, [2])
    clock.at += 5
    engine.run_once()
    plans.is_broken = False
    engine.run_once()
    assert engine.verdict("r").rule == "rules_stopped", "it is not due yet"
    clock.at += 6
    engine.run_once()
    assert bench.told() == [("r", "nonfinite_loss"), ("sick", "nonfinite_loss")]
    assert engine.verdict("r").rule == "nonfinite_loss"
    assert (engine.counters["set_aside"], engine.counters["left_out_frames"]) == (0, 0)


def test_the_pauses_between_two_tries_grow(bench: Bench) -> None:
    clock, tries = Clock(NOW), set[str]()
    engine = broken(bench, Breakable(), clock)
    for _ in range(600):
        engine.run_once()
        tries.add(engine.aside.shown()[0]["next_try"])
        clock.at += 5
    assert 5 <= len(tries) <= 12


@pytest.mark.parametrize("is_new", [False, True])
def test_frames_of_a_run_set_aside_are_judged_by_the_next_server(bench: Bench, is_new: bool) -> None:
    """Also of a new run, although nothing comes any more."""
    plans, clock = Breakable(), Clock(NOW)
    bench.send({"loss": [2.0]}, [1])
    engine = engine_of(bench, plans, clock)
    if not is_new:
        engine.run_once()
        engine.checkpoint()
    break_run(bench)
    engine.reload("r")
    bench.send({"loss": [math.nan]}, [2])
    engine.run_once()
    engine.checkpoint()
    assert {row["tail_id"] for row in bench.rows(cursor)} == {2}, "the cursor goes on"
    assert bench.told() == []
    plans.is_broken = False
    again = engine_of(bench, plans, clock)
    if not is_new:
        bench.send({"loss": [math.nan]}, [3])
    for _ in range(2):
        again.run_once()
        assert [(row["run"], row["since_step"]) for row in bench.rows(alert)] == [("r", 2)]


@pytest.mark.blocks
def test_frames_that_left_the_tail_are_counted_as_left_out(bench: Bench) -> None:
    plans, clock = Breakable(), Clock(NOW)
    engine = broken(bench, plans, clock)
    for step in (2, 3):
        bench.send({"loss": [2.0]}, [step])
    engine.run_once()
    engine.checkpoint()
    Compactor(bench.database, policy=CompactionPolicy(age_s=-math.inf)).run_once()
    bench.send({"loss": [math.nan]}, [4])
    engine.run_once()
    plans.is_broken = False
    clock.at += 60
    engine.run_once()
    assert bench.told() == [("r", "nonfinite_loss")]
    assert engine.counters["left_out_frames"] == 3


def test_a_deleted_run_is_set_aside_no_longer(bench: Bench) -> None:
    engine = broken(bench, Breakable(), Clock(NOW))
    bench.store.delete("r")
    engine.drop("r")
    engine.run_once()
    assert engine.aside.shown() == []
    assert engine.verdict("r").rule == "healthy"


class NoShards:
    """Of a server beside another one, which judges all runs."""

    held: ClassVar[dict[str, int]] = {}

    def verify(self, *_: object) -> None: ...


def test_another_server_shows_that_a_run_is_set_aside(bench: Bench) -> None:
    broken(bench, Breakable(), Clock(NOW))
    other = bench.engine(shards=NoShards())
    found = other.verdict("r")
    assert (found.rule, [one.rule for one in other.findings("r")]) == ("rules_stopped", ["rules_stopped"])
    assert "LookupError: no such threshold" in found.message


class Fragile(Plan):
    """Rules that break on a frame with a certain series."""

    def columns(self, names: tuple[str, ...]) -> Columns:
        if "poison" in names:
            raise OverflowError("a frame nobody foresaw")
        return super().columns(names)


@pytest.mark.sql
def test_run_that_fails_again_and_again_is_set_aside(bench: Bench) -> None:
    clock, plan = Clock(NOW), Fragile(all_rules())
    engine = bench.engine(clock=clock, plan_of=lambda *_: plan)
    bench.send({"loss": [2.0]}, [1])
    for step in range(2, 7):
        bench.send({"poison": [1.0]}, [step])
    engine.run_once()
    assert "OverflowError: a frame nobody foresaw" in engine.verdict("r").message
    bench.send({"loss": [math.nan]}, [7])
    engine.run_once()
    assert bench.told() == []
    clock.at += 11
    engine.run_once()
    assert [(row["rule"], row["since_step"]) for row in bench.rows(alert)] == [("nonfinite_loss", 7)]
    assert engine.counters["set_aside"] == 0


def test_an_event_of_a_frame_that_cannot_be_judged_is_told(bench: Bench) -> None:
    plan = Fragile(all_rules())
    engine = bench.engine(plan_of=lambda *_: plan)
    said = [Event(kind="alert", time=NOW, step=1, data={"title": "look", "text": "here", "level": "warning"})]
    bench.send({"poison": [1.0]}, [1], events=said)
    bench.send({}, [], events=[Event(kind="state", time=NOW, step=1, data={"state": "failed"})])
    engine.run_once()
    assert bench.told() == [("r", "process_crash"), ("r", "user_alert")]


# --- stored settings --------------------------------------------------------------------------------------------------


def settings_of(bench: Bench, rule: str, stored: str, project: str = "") -> RuleSettings:
    """The rules of a server that starts with this row."""
    row = {"project": project, "rule": rule, "settings": stored}
    bench.write(rule_setting.insert().values(**row))
    return RuleSettings(bench.database, bench.settings.data / RULES_FILE)


@pytest.mark.parametrize(
    ("rule", "stored", "named"),
    [
        ("loss_spike", '{"gone": 1}', "loss_spike has no threshold 'gone'"),
        ("no_such_rule", '{"enabled": false}', "there is no rule 'no_such_rule'"),
        ("nonfinite_loss", '{"excused_steps": NaN}', "excused_steps"),
        ("nonfinite_loss", '{"enabled": "no"}', "enabled"),
        ("nonfinite_loss", '{"excused_steps": 1' + "0" * 5000 + "}", "nonfinite_loss"),
        ("nonfinite_loss", "[1, 2]", "must be a table"),
        ("nonfinite_loss", "no JSON", "is no JSON"),
        ("nonfinite_loss", "[" * 100_000, "is no JSON"),
    ],
)
def test_a_stored_setting_that_is_none_is_ignored_and_shown(bench: Bench, rule: str, stored: str, named: str) -> None:
    settings = settings_of(bench, rule, stored)
    engine = bench.engine(plan_of=settings.plan_of)
    send_nan(bench)
    engine.run_once()
    assert bench.told() == [("sick", "nonfinite_loss")]
    [ignored] = settings.ignored("p")
    assert (ignored.rule, named in ignored.why) == (rule, True)


def test_the_rest_of_a_setting_counts(bench: Bench) -> None:
    settings = settings_of(bench, "nonfinite_loss", '{"gone": 1, "excused_steps": 7}', "p")
    [rule] = [one.rule for one in settings.rules_of("p") if one.rule.id == "nonfinite_loss"]
    assert rule.thresholds()["excused_steps"] == 7
    assert settings.ignored("other") == []


# --- other rows that a round reads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("column", ["tags", "rules_off", "config", "meta"])
def test_a_run_whose_row_cannot_be_read_is_judged(bench: Bench, column: str) -> None:
    engine = bench.engine()
    bench.send({"loss": [2.0]}, [1])
    bench.write(update(run).values({column: "?"}))
    send_nan(bench, "r")
    engine.run_once()
    assert bench.told() == [("r", "nonfinite_loss")]


@pytest.mark.blocks
def test_frame_that_cannot_be_decoded_is_never_compacted(bench: Bench) -> None:
    engine = bench.engine()
    bench.send({"loss": [2.0]}, [1], name="odd")
    bench.write(update(tail).values(frame=b"\xc1\xc1"))
    send_nan(bench)
    engine.run_once()
    assert bench.told() == [("sick", "nonfinite_loss")]
    engine.checkpoint()
    compactor = Compactor(bench.database, policy=CompactionPolicy(age_s=-math.inf))
    with pytest.raises(msgspec.DecodeError):
        compactor.run_once()
    compactor.run_once()
    assert [row["run"] for row in bench.rows(tail)] == ["odd"], "those of others are packed"


@pytest.mark.sql
@pytest.mark.sqlite
@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(
    "broken",
    [
        "run SET rules_off = CAST(x'ff' AS TEXT)",
        "run SET project = CAST(x'ff' AS TEXT)",
        "run SET state = CAST(x'ff' AS TEXT), ended = 5",
        "source SET state = CAST(x'ff' AS TEXT)",
        "alert SET state = CAST(x'ff' AS TEXT)",
        "tail SET source = CAST(x'ff' AS TEXT)",
        "tail SET frame = 5",
        "tail SET frame = 'text'",
        "tail SET received = 'soon'",
        "tail SET attempt = 'x', rank = 'x', seq = 'x'",
        "rule_state SET state = 'text', version = -1",
    ],
)
def test_a_row_of_one_run_that_cannot_be_read_holds_up_no_round(bench: Bench, broken: str, is_restarted: bool) -> None:
    engine = bench.engine()
    send_nan(bench, "odd")
    if is_restarted:
        engine.run_once()
        engine.checkpoint()
    bench.write(text(f"UPDATE {broken}"))
    send_nan(bench)
    for _ in range(2):
        engine = bench.engine()
        while engine.run_once():
            pass
        engine.look_for_silence()
        engine.settle_outcomes()
        engine.checkpoint()
    assert ("sick", "nonfinite_loss") in bench.told()
    assert engine.verdict("odd").rule


@pytest.mark.sqlite
def test_a_damaged_page_of_one_run_costs_no_other_run_its_alert(bench: Bench) -> None:
    bench.send({"loss": [2.0]}, [1], name="odd")
    marked = b"A mark in the middle of a row on several pages." * 1000
    row = {"run": "odd", "version": 0, "state": marked}
    bench.write(rule_state.insert().values(**row))
    file = bench.settings.data / "perfagent.db"
    with sqlite3.connect(file) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        page = other.execute("PRAGMA page_size").fetchone()[0]
    other.close()
    damaged = bytearray(file.read_bytes())
    middle = damaged.index(marked[:47], damaged.index(marked[:47]) + 2 * page) // page * page
    damaged[middle : middle + 4] = b"\xff" * 4  # where the row goes on
    file.write_bytes(damaged)
    engine = bench.engine()
    send_nan(bench)
    engine.run_once()
    engine.run_once()
    assert bench.told() == [("sick", "nonfinite_loss")]
    assert "malformed" in engine.verdict("odd").message
    engine.checkpoint()


def test_a_retention_that_cannot_be_read_deletes_nothing(bench: Bench) -> None:
    rows_ = [{"project": "a", "settings": "?"}, {"project": "b", "settings": '{"runs_days": "soon"}'}]
    bench.write(retention_setting.insert(), rows_)
    with bench.database.read() as connection:
        policies = Policies(RetentionPolicy(runs_days=1.0), stored_policies(connection))
    assert [policies.of(project).runs_days for project in ("a", "b", "c")] == [None, None, 1.0]


def test_key_with_unreadable_limits_has_those_of_the_server(bench: Bench) -> None:
    keys = Keys(bench.database, "pepper")
    _, token = keys.create("ingest", "a")
    bench.write(update(api_key).values(limits="?"))
    found = Keys(bench.database, "pepper").find(token)
    assert found is not None
    assert found.limits == {}
