"""Retention by project and by resolution, and size budgets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select, update

from perfagent.wire import Frame
from perfagent_server.store import tables
from perfagent_server.store.retention import DAY_S, FOREVER, KEEP_TAG, Retention, RetentionPolicy, set_policy
from perfagent_server.store.retention.budget import Candidate, plan
from perfagent_server.store.retention.sizes import measure_runs, total_bytes, used_bytes

STEPS = 40_000
LATER = BEGIN + 100 * DAY_S


def of(project: str, one: Frame) -> Frame:
    return msgspec.structs.replace(one, project=project)


def finished(shelf, run: str, project: str = "p", *, at: float = BEGIN, seed: int = 1, steps: int = STEPS) -> None:
    """A run of one series that ended."""
    noise = np.random.default_rng(seed).standard_normal(steps)
    times = (at + 0.25 * np.arange(steps)).tolist()
    shelf.append(of(project, frame(1, rows({"loss": noise}, range(steps), times), run=run)), now=at)
    shelf.append(of(project, frame(2, state("finished", time=at), run=run)), now=at)
    shelf.compact()


def hello(shelf, now: float) -> None:
    shelf.append(frame(int(now - BEGIN) % 10**9 + 1, rows({"loss": [1.0]}, [0], [now]), run="alive"), now=now)


def retention_at(shelf, now: float, up: float = 1000.0, **policy: float) -> Retention:
    return Retention(
        shelf.database,
        shelf.store,
        RetentionPolicy(**policy),
        clock=lambda: now,
        uptime=lambda: up,
        thin_elsewhere=shelf.thin,
    )


def setting(shelf, project: str, settings: Mapping[str, Any]) -> None:
    shelf.database.write(lambda connection: set_policy(connection, project, settings))


def tag(shelf, run: str, *tags: str) -> None:
    change = update(tables.run).where(tables.run.c.id == run).values(tags=json.dumps(tags))
    shelf.database.write(lambda connection: connection.execute(change))


def samples(shelf, run: str) -> int:
    return sum(1 for _ in shelf.store.samples(run))


def runs_left(shelf) -> list[str]:
    with shelf.database.read() as connection:
        return sorted(connection.execute(select(tables.run.c.id)).scalars())


def audited(shelf) -> list[str]:
    with shelf.database.read() as connection:
        return list(connection.execute(select(tables.audit.c.action).order_by(tables.audit.c.id)).scalars())


# --- by age -----------------------------------------------------------------------------------------------------------


def test_a_project_keeps_its_samples_longer_than_the_others_and_a_kept_run_for_ever(shelf) -> None:
    for project, run in (("p", "usual"), ("q", "long"), ("r", "always"), ("p", "kept")):
        finished(shelf, run, project, steps=3000)
    tag(shelf, "kept", "baseline", KEEP_TAG)
    setting(shelf, "q", {"samples_days": 200})
    setting(shelf, "r", {"samples_days": FOREVER})
    now = LATER
    hello(shelf, now)
    kept = RetentionPolicy(samples_days=30)
    retention = Retention(
        shelf.database, shelf.store, kept, clock=lambda: now, uptime=lambda: now, thin_elsewhere=shelf.thin
    )
    retention.run_once()
    assert [samples(shelf, run) for run in ("usual", "long", "always", "kept")] == [0, 3000, 3000, 3000]
    now = BEGIN + 201 * DAY_S
    hello(shelf, now)
    retention.run_once()
    assert [samples(shelf, run) for run in ("usual", "long", "always", "kept")] == [0, 0, 3000, 3000]
    assert audited(shelf) == ["retention.samples", "retention.samples"]


def test_the_default_of_all_projects_is_over_the_settings_and_below_those_of_a_project(shelf) -> None:
    finished(shelf, "a", "p", steps=10)
    finished(shelf, "b", "q", steps=10)
    setting(shelf, "", {"runs_days": 50})
    setting(shelf, "q", {"runs_days": FOREVER})
    hello(shelf, LATER)
    retention_at(shelf, LATER, runs_days=1000).run_once()
    assert runs_left(shelf) == ["alive", "b"]
    assert audited(shelf) == ["retention.run"]
    with shelf.database.read() as connection:
        told = connection.execute(select(tables.audit.c.project, tables.audit.c.thing)).all()
    assert told == [("p", "a")], "whoever looks for the run, or may see the project, finds it"


@pytest.mark.blocks
@pytest.mark.parametrize(("field", "width"), [("rollup16_days", 256), ("rollup256_days", 4096)])
def test_cells_of_old_runs_are_put_together_and_wide_charts_stay_as_they_were(shelf, field: str, width: int) -> None:
    finished(shelf, "old")
    points = STEPS // width
    before = shelf.store.series("old", "loss", points=points)
    fine = shelf.store.series("old", "loss", points=2000)
    hello(shelf, LATER)
    retention = retention_at(shelf, LATER, **{field: 30})
    retention.run_once()
    after = shelf.store.series("old", "loss", points=points)
    for name in ("step", "min", "max", "count"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.mean == pytest.approx(before.mean)
    left = shelf.store.series("old", "loss", points=2000)
    assert sum(left.count) == sum(fine.count) == STEPS
    assert (min(left.min), max(left.max)) == (min(fine.min), max(fine.max))
    assert len(left.step) <= STEPS / min(width, 1024) + 2
    assert (samples(shelf, "old"), samples(shelf, "alive")) == (0, 1)
    assert retention.counters["runs_rolled_up"] == 1
    retention.run_once()
    assert retention.counters["runs_rolled_up"] == 1, "it is done once"


def test_a_run_that_goes_on_after_its_cells_were_put_together_counts_every_sample(shelf) -> None:
    finished(shelf, "old", steps=3000)
    hello(shelf, LATER)
    retention_at(shelf, LATER, rollup16_days=30).run_once()
    late = rows({"loss": [50.0, 60.0]}, [100, 3001], [LATER, LATER])
    shelf.append(frame(3, late, run="old"), now=LATER)
    shelf.compact()
    found = shelf.store.series("old", "loss", points=10)
    assert (sum(found.count), max(found.max)) == (3002, 60.0)
    shown = shelf.store.series("old", "loss", from_step=0, to_step=511, points=2)
    assert max(shown.max) == 50.0


@pytest.mark.parametrize("how", ["it goes on", "it is tagged", "the policy changes"])
def test_a_run_that_must_stay_by_now_is_not_deleted_by_a_round_that_found_it_before(shelf, how: str) -> None:
    for number, run in enumerate(("first", "second")):
        finished(shelf, run, at=BEGIN + number, steps=10)
    hello(shelf, LATER)

    def happens(_deleted: str) -> None:
        if how == "it goes on":
            shelf.append(frame(3, rows({"loss": [2.0]}, [10], [LATER]), run="second"), now=LATER)
        elif how == "it is tagged":
            tag(shelf, "second", KEEP_TAG)
        else:
            setting(shelf, "p", {"runs_days": FOREVER})

    policy = RetentionPolicy(runs_days=30)
    retention = Retention(shelf.database, shelf.store, policy, clock=lambda: LATER, on_deleted=happens)
    retention.run_once()
    assert runs_left(shelf) == ["alive", "second"]
    assert samples(shelf, "second") == 10 + (how == "it goes on")
    assert (audited(shelf), retention.counters["runs_deleted"]) == (["retention.run"], 1)


# --- by size ----------------------------------------------------------------------------------------------------------


@pytest.mark.blocks
def test_a_budget_takes_samples_of_the_oldest_run_first_and_no_more_than_it_must(shelf) -> None:
    for number in range(4):
        finished(shelf, f"r{number}", at=BEGIN + number * DAY_S, seed=number)
    measure_runs(shelf.database, BEGIN, Stop())
    with shelf.database.read() as connection:
        total = total_bytes(connection, "p")
        one = connection.execute(
            select(tables.run_storage.c.samples_bytes).where(tables.run_storage.c.run == "r0")
        ).scalar_one()
    now = BEGIN + 10 * DAY_S
    setting(shelf, "p", {"max_bytes": total - one // 2})
    retention = retention_at(shelf, now)
    going = retention.preview().budgets
    assert [(step.action, step.run.run) for step in going[0].steps] == [("samples", "r0")]
    assert samples(shelf, "r0") == STEPS, "a preview changes nothing"
    retention.run_once()
    assert [samples(shelf, f"r{number}") for number in range(4)] == [0, STEPS, STEPS, STEPS]
    assert (retention.counters["budget_steps"], retention.counters["over_budget_bytes"]) == (1, 0)
    assert audited(shelf) == ["retention.budget.samples"]
    assert retention.preview().budgets == []


def test_a_small_budget_ends_with_runs_and_spares_live_and_kept_ones_and_other_projects(shelf) -> None:
    for number in range(4):
        finished(shelf, f"r{number}", at=BEGIN + number * DAY_S, seed=number, steps=2000)
    finished(shelf, "other", "q", at=BEGIN, steps=2000)
    tag(shelf, "r1", "KEEP")
    hello(shelf, BEGIN + 9 * DAY_S)  # goes on, in project p
    setting(shelf, "p", {"max_bytes": 10})
    retention = retention_at(shelf, BEGIN + 10 * DAY_S)
    retention.run_once()
    assert runs_left(shelf) == ["alive", "other", "r1"]
    assert [samples(shelf, run) for run in ("alive", "other", "r1")] == [1, 2000, 2000]
    assert retention.counters["over_budget_bytes"] > 0
    assert retention.counters["refused"] == 1, "what is left is told once"
    assert audited(shelf).count("retention.budget.run") == 3


@pytest.mark.blocks
def test_a_run_that_failed_within_a_day_may_restart_and_loses_nothing_for_a_budget(shelf) -> None:
    finished(shelf, "failed", steps=3000)
    setting(shelf, "p", {"max_bytes": 10})
    retention_at(shelf, BEGIN + 3600).run_once()
    assert samples(shelf, "failed") == 3000
    retention_at(shelf, BEGIN + 25 * 3600).run_once()
    assert runs_left(shelf) == []


@pytest.mark.parametrize("how", ["it goes on", "it is tagged"])
def test_a_budget_spares_a_run_that_must_stay_by_now(shelf, how: str) -> None:
    for number in range(2):
        finished(shelf, f"r{number}", at=BEGIN + number, seed=number, steps=3000)
    setting(shelf, "p", {"max_bytes": 10})
    now = BEGIN + 5 * DAY_S

    def happens(deleted: str) -> None:
        if deleted != "r0":
            return
        if how == "it goes on":
            shelf.append(of("p", frame(3, rows({"loss": [2.0]}, [3000], [now]), run="r1")), now=now)
        else:
            tag(shelf, "r1", KEEP_TAG)

    Retention(shelf.database, shelf.store, clock=lambda: now, on_deleted=happens).run_once()
    assert runs_left(shelf) == ["r1"]


@pytest.mark.blocks
def test_a_budget_of_the_database_counts_what_is_in_use(shelf) -> None:
    for number in range(3):
        finished(shelf, f"r{number}", at=BEGIN + number * DAY_S, seed=number)
    measure_runs(shelf.database, BEGIN, Stop())
    used = used_bytes(shelf.database)
    retention = retention_at(shelf, BEGIN + 5 * DAY_S, max_bytes=used - 200_000)
    retention.run_once()
    assert used_bytes(shelf.database) <= used - 200_000
    assert samples(shelf, "r0") == 0
    assert samples(shelf, "r2") == STEPS


def test_a_plan_takes_every_runs_samples_before_anybodys_cells_and_cells_before_runs() -> None:
    runs = [
        Candidate(
            run=name, name=name, project="p", over=BEGIN, finest_steps=finest, samples_bytes=1000, cells_bytes=160,
            rollups_bytes=17, other_bytes=5,
        )
        for name, finest in (("a", 1), ("b", 1), ("c", 256))
    ]  # fmt: skip
    order = [(step.action, step.run.run) for step in plan(runs, 10_000)]
    assert order == [
        ("samples", "a"), ("samples", "b"), ("rollup16", "a"), ("rollup16", "b"), ("rollup256", "a"), ("rollup256", "b"),
        ("rollup256", "c"), ("run", "a"), ("run", "b"), ("run", "c"),
    ]  # fmt: skip
    assert [step.action for step in plan(runs, 1500)] == ["samples", "samples"]
    assert plan(runs, 0) == []


# --- clocks -----------------------------------------------------------------------------------------------------------


@pytest.mark.fault
@pytest.mark.parametrize("jump_days", [365, -365])
def test_s10_a_clock_that_jumps_a_year_costs_nothing_by_age_or_by_size(shelf, jump_days: int) -> None:
    clock = {"now": BEGIN, "up": 1000.0}
    finished(shelf, "yesterday", steps=3000)
    policy = RetentionPolicy(samples_days=30, rollup16_days=30, runs_days=30, max_bytes=10)
    retention = Retention(shelf.database, shelf.store, policy, clock=lambda: clock["now"], uptime=lambda: clock["up"])
    clock["up"] += DAY_S
    clock["now"] += (1 + jump_days) * DAY_S
    hello(shelf, clock["now"])  # a job sends on, and is heard of by the wrong clock
    for _ in range(3):
        retention.run_once()
    assert runs_left(shelf) == ["alive", "yesterday"]
    assert samples(shelf, "yesterday") == 3000
    assert retention.counters["refused"] == 3
    assert "the clock jumped" in retention.preview().refused


@pytest.mark.fault
def test_s10_a_run_that_was_recorded_while_our_clock_was_a_year_behind_is_as_old_as_its_sender_says(shelf) -> None:
    """Its agent had the right time: by that, it ended yesterday."""
    wrong, right = BEGIN - 365 * DAY_S, BEGIN
    shelf.append(frame(1, rows({"loss": [1.0]}, [1], [right]), run="r1", sent=right), now=wrong)
    shelf.append(frame(2, state("finished", time=right), run="r1", sent=right), now=wrong)
    shelf.compact()
    now = BEGIN + DAY_S
    hello(shelf, now)
    retention_at(shelf, now, runs_days=30).run_once()
    assert runs_left(shelf) == ["alive", "r1"]


class Stop:
    """An event that is never set."""

    @staticmethod
    def is_set() -> bool:
        return False
