"""Retention by project and by resolution, and size budgets."""

from __future__ import annotations

import json
import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import select, update

from perfagent_server.store import tables
from perfagent_server.store.retention import DAY_S, FOREVER, KEEP_TAG, set_policy
from perfagent_server.store.retention.sizes import measure_runs, total_bytes

STEPS = 40_000
LATER = BEGIN + 100 * DAY_S


def finished(shelf, run: str, project: str = "p", *, at: float = BEGIN, steps: int = STEPS) -> None:
    """A run of one series that ended."""
    noise = np.random.default_rng(1).standard_normal(steps)
    losses = rows({"loss": noise}, range(steps), (at + 0.25 * np.arange(steps)).tolist())
    for sent in (frame(1, losses, run=run), frame(2, state("finished", time=at), run=run)):
        shelf.append(msgspec.structs.replace(sent, project=project), now=at)
    shelf.compact()


def four_finished(shelf, steps: int = STEPS) -> None:
    for number in range(4):
        finished(shelf, f"r{number}", at=BEGIN + number * DAY_S, steps=steps)


def goes_on(shelf, run: str = "alive", step: int = 0) -> None:
    seq = int(shelf.now - BEGIN) % 10**9 + 1
    shelf.append(frame(seq, rows({"loss": [1.0]}, [step], [shelf.now]), run=run))


def setting(shelf, project: str, **settings: Any) -> None:
    shelf.database.write(lambda connection: set_policy(connection, project, settings))


def tag(shelf, run: str, *tags: str) -> None:
    shelf.execute(update(tables.run).where(tables.run.c.id == run).values(tags=json.dumps(tags)))


def kept(shelf, *runs: str) -> list[int]:
    """How many samples each run has."""
    return [len(shelf.samples(run)) for run in runs]


def audited(shelf) -> list[str]:
    return shelf.ask(select(tables.audit.c.action).order_by(tables.audit.c.id))


@pytest.mark.sql
def test_a_project_may_keep_samples_longer_and_a_run_for_ever(shelf) -> None:
    for project, run in (("p", "usual"), ("q", "long"), ("r", "always"), ("p", "kept")):
        finished(shelf, run, project, steps=3000)
    tag(shelf, "kept", "baseline", KEEP_TAG)
    setting(shelf, "q", samples_days=200)
    setting(shelf, "r", samples_days=FOREVER)
    shelf.now = LATER
    retention = shelf.retention(samples_days=30)
    for expected in ([0, 3000, 3000, 3000], [0, 0, 3000, 3000]):
        goes_on(shelf)
        retention.run_once()
        assert kept(shelf, "usual", "long", "always", "kept") == expected
        shelf.pass_by(101 * DAY_S)
    assert audited(shelf) == ["retention.samples", "retention.samples"]


@pytest.mark.sql
def test_projects_are_over_the_default_and_that_over_settings(shelf) -> None:
    finished(shelf, "a", "p", steps=10)
    finished(shelf, "b", "q", steps=10)
    setting(shelf, "", runs_days=50)
    setting(shelf, "q", runs_days=FOREVER)
    shelf.now = LATER
    goes_on(shelf)
    shelf.retention(runs_days=1000).run_once()
    assert (shelf.runs(), audited(shelf)) == (["alive", "b"], ["retention.run"])
    about = shelf.ask(select(tables.audit.c.project, tables.audit.c.thing))
    assert about == [("p", "a")], "whoever looks for the run, or may see the project, finds it"


@pytest.mark.sql
@pytest.mark.blocks
@pytest.mark.parametrize(("field", "width"), [("rollup16_days", 256), ("rollup256_days", 4096)])
def test_old_cells_are_put_together_and_wide_charts_stay(shelf, field: str, width: int) -> None:
    finished(shelf, "old")
    before, fine = (shelf.store.series("old", "loss", points=points) for points in (STEPS // width, 2000))
    shelf.now = LATER
    goes_on(shelf)
    retention = shelf.retention(**{field: 30})
    retention.run_once()
    after, left = (shelf.store.series("old", "loss", points=points) for points in (STEPS // width, 2000))
    for name in ("step", "min", "max", "count"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.mean == pytest.approx(before.mean)
    assert sum(left.count) == sum(fine.count) == STEPS
    assert (min(left.min), max(left.max)) == (min(fine.min), max(fine.max))
    assert len(left.step) <= STEPS / min(width, 1024) + 2
    assert kept(shelf, "old", "alive") == [0, 1]
    retention.run_once()
    assert retention.counters["runs_rolled_up"] == 1, "it is done once"


@pytest.mark.parametrize(
    ("how", "policy"), [("it goes on", {"runs_days": 30}), ("it is tagged", {}), ("the policy changes", {"runs_days": 30})]
)  # fmt: skip
def test_a_run_that_must_stay_by_now_is_not_deleted(shelf, how: str, policy: dict[str, float]) -> None:
    """Though the round that deletes, by age or by budget, had found it before."""
    for number, run in enumerate(("first", "second")):
        finished(shelf, run, at=BEGIN + number, steps=10)
    shelf.now = LATER
    goes_on(shelf)
    if not policy:
        setting(shelf, "p", max_bytes=10)

    def happens(_deleted: str) -> None:
        if how == "it goes on":
            goes_on(shelf, "second", step=10)
        elif how == "it is tagged":
            tag(shelf, "second", KEEP_TAG)
        else:
            setting(shelf, "p", runs_days=FOREVER, max_bytes=1e12)

    retention = shelf.retention(on_deleted=happens, **policy)
    retention.run_once()
    assert (shelf.runs(), retention.counters["runs_deleted"]) == (["alive", "second"], 1)


@pytest.mark.sql
@pytest.mark.blocks
def test_a_budget_takes_samples_of_the_oldest_run_first(shelf) -> None:
    four_finished(shelf)
    measure_runs(shelf.database, BEGIN, threading.Event())
    with shelf.database.read() as connection:
        total = total_bytes(connection, "p")
    storage = tables.run_storage.c
    [one] = shelf.ask(select(storage.samples_bytes).where(storage.run == "r0"))
    setting(shelf, "p", max_bytes=total - one // 2)
    shelf.now = BEGIN + 10 * DAY_S
    retention = shelf.retention()
    going = retention.preview().budgets
    assert [(step.action, step.run.run) for step in going[0].steps] == [("samples", "r0")]
    assert kept(shelf, "r0") == [STEPS], "a preview changes nothing"
    retention.run_once()
    assert kept(shelf, "r0", "r1", "r2", "r3") == [0, STEPS, STEPS, STEPS]
    assert (retention.counters["budget_steps"], retention.counters["over_budget_bytes"]) == (1, 0)
    assert audited(shelf) == ["retention.budget.samples"]
    assert retention.preview().budgets == []


@pytest.mark.sql
def test_a_small_budget_spares_live_and_kept_runs_and_others(shelf) -> None:
    four_finished(shelf, steps=2000)
    finished(shelf, "other", "q", at=BEGIN, steps=2000)
    tag(shelf, "r1", "KEEP")
    shelf.now = BEGIN + 9 * DAY_S
    goes_on(shelf)
    setting(shelf, "p", max_bytes=10)
    shelf.now = BEGIN + 10 * DAY_S
    retention = shelf.retention()
    retention.run_once()
    assert shelf.runs() == ["alive", "other", "r1"]
    assert kept(shelf, "alive", "other", "r1") == [1, 2000, 2000]
    assert retention.counters["over_budget_bytes"] > 0
    assert retention.counters["refused"] == 1, "what is left is told once"
    assert audited(shelf).count("retention.budget.run") == 3


@pytest.mark.blocks
def test_a_run_that_failed_within_a_day_keeps_all_of_it(shelf) -> None:
    """It may restart."""
    finished(shelf, "failed", steps=3000)
    setting(shelf, "p", max_bytes=10)
    for hours, left in ((23.9, [3000]), (25, [])):
        shelf.now = BEGIN + hours * 3600
        shelf.retention().run_once()
        assert [len(shelf.samples(run)) for run in shelf.runs()] == left


@pytest.mark.fault
@pytest.mark.parametrize("jump_days", [365, -365])
def test_s10_a_clock_that_jumps_a_year_costs_nothing(shelf, jump_days: int) -> None:
    finished(shelf, "yesterday", steps=3000)
    retention = shelf.retention(samples_days=30, rollup16_days=30, runs_days=30, max_bytes=10)
    shelf.pass_by(DAY_S)
    shelf.now += jump_days * DAY_S
    goes_on(shelf)  # a job sends on, and is heard of by the wrong clock
    for _ in range(3):
        retention.run_once()
    assert (shelf.runs(), kept(shelf, "yesterday")) == (["alive", "yesterday"], [3000])
    assert retention.counters["refused"] == 3
    assert "the clock jumped" in retention.preview().refused
