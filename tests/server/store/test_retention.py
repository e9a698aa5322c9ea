from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from frames import BEGIN, frame, rows, state
from sqlalchemy import func, select, update
from sqlite_calls import sqlite_calls

from perfagent_server.store import tables
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.retention.resolution import BLOCKS_AT_ONCE, _thin_blocks, old_blocks, old_bundles


@dataclass
class Clocks:
    """The wall clock and the one that nobody sets."""

    now: float = BEGIN
    up: float = 1000.0

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.up += seconds


def retention_at(shelf, clocks: Clocks, **policy: float) -> Retention:
    kept = RetentionPolicy(**policy)
    return Retention(shelf.database, shelf.store, kept, clock=lambda: clocks.now, uptime=lambda: clocks.up)


def say_hello(shelf, now: float, run: str = "alive") -> None:
    """A run is heard of, so that the clock is believed."""
    shelf.append(frame(int(now - BEGIN) + 1, run=run), now=now)


def runs_left(shelf) -> list[str]:
    with shelf.database.read() as connection:
        return sorted(connection.execute(select(tables.run.c.id)).scalars())


@pytest.mark.blocks
def test_old_blocks_lose_their_samples_and_charts_stay_exact(shelf) -> None:
    value = np.random.default_rng(1).standard_normal(5000)
    shelf.append(frame(1, rows({"loss": value}, range(5000))))
    shelf.compact()
    before = shelf.store.series("r1", "loss", points=200)
    say_hello(shelf, BEGIN + 40 * DAY_S)
    Retention(
        shelf.database, shelf.store, RetentionPolicy(samples_days=30), clock=lambda: BEGIN + 40 * DAY_S
    ).run_once()
    with shelf.database.read() as connection:
        assert connection.execute(select(func.count(tables.block.c.payload))).scalar() == 0
    assert shelf.store.series("r1", "loss", points=200) == before
    near = shelf.store.series("r1", "loss", from_step=100, to_step=131, points=1000)
    assert (near.exact, near.count) == (False, [16, 16, 16])  # cells of 16 steps are what is left
    assert list(shelf.store.samples("r1")) == []
    # A late piece still counts
    shelf.append(frame(2, rows({"loss": [99.0]}, [120])))
    shelf.compact()
    assert max(shelf.store.series("r1", "loss", points=200).max) == 99.0
    assert sum(shelf.store.series("r1", "loss", points=200).count) == 5001


def test_young_blocks_keep_their_samples(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0] * 10}, range(10))))
    shelf.compact()
    say_hello(shelf, BEGIN + 20 * DAY_S)
    Retention(
        shelf.database, shelf.store, RetentionPolicy(samples_days=30), clock=lambda: BEGIN + 20 * DAY_S
    ).run_once()
    assert len(list(shelf.store.samples("r1"))) == 10


@pytest.mark.parametrize("ended", [True, False])
def test_runs_over_age_are_deleted_whole(shelf, ended: bool) -> None:
    pieces = [state("finished"), rows({"loss": [1.0]}, [1])] if ended else [rows({"loss": [1.0]}, [1])]
    shelf.append(frame(1, *pieces, run="old"))
    shelf.append(frame(1, rows({"loss": [1.0]}, [1]), run="new"), now=BEGIN + 50 * DAY_S)
    retention = Retention(shelf.database, shelf.store, RetentionPolicy(runs_days=30), clock=lambda: BEGIN + 60 * DAY_S)
    retention.run_once()
    assert retention.counters["runs_deleted"] == 1
    assert shelf.store.names("old") == []
    assert shelf.store.names("new") == ["loss"]


@pytest.mark.long
@pytest.mark.sqlite
def test_the_file_gives_room_back_to_the_disk(shelf, place) -> None:
    noise = np.random.default_rng(1).standard_normal(120_000)
    for seq in range(1, 15):
        shelf.append(frame(seq, rows({"loss": noise}, np.arange(120_000) + seq * 120_000)))
    shelf.compact()
    shelf.store.delete("r1")
    path = place.data / "perfagent.db"

    def size() -> int:
        with shelf.database.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        return path.stat().st_size

    before = size()
    Retention(shelf.database, shelf.store).run_once()
    assert size() < before * 0.7


def test_a_clock_that_jumped_ahead_deletes_nothing_until_it_is_set_right(shelf) -> None:
    clocks = Clocks()
    shelf.append(frame(1, state("finished", time=BEGIN), rows({"loss": [1.0]}, [1]), run="yesterday"))
    shelf.compact()
    retention = retention_at(shelf, clocks, runs_days=30, samples_days=30)
    clocks.pass_by(DAY_S)
    clocks.now += 365 * DAY_S
    say_hello(shelf, clocks.now)  # a job sends on, and is heard of by the wrong clock
    for _ in range(3):
        retention.run_once()
        clocks.pass_by(3600)
    assert (runs_left(shelf), retention.counters["refused"]) == (["alive", "yesterday"], 3)
    assert len(list(shelf.store.samples("yesterday"))) == 1
    clocks.now -= 365 * DAY_S
    retention.run_once()
    assert (runs_left(shelf), retention.counters["refused"]) == (["alive", "yesterday"], 3)


def test_a_jump_that_lasts_a_week_is_the_right_time(shelf) -> None:
    clocks = Clocks()
    shelf.append(frame(1, state("finished", time=BEGIN), run="old"))
    retention = retention_at(shelf, clocks, runs_days=30)
    clocks.now += 365 * DAY_S
    retention.run_once()
    clocks.pass_by(8 * DAY_S)
    say_hello(shelf, clocks.now)
    retention.run_once()
    assert runs_left(shelf) == ["alive"]


def test_a_server_that_starts_with_a_clock_far_ahead_of_all_runs_deletes_nothing(shelf) -> None:
    shelf.append(frame(1, state("finished", time=BEGIN), run="yesterday"))
    retention = retention_at(shelf, Clocks(now=BEGIN + 366 * DAY_S), runs_days=30, samples_days=1)
    retention.run_once()
    assert (runs_left(shelf), retention.counters["refused"]) == (["yesterday"], 1)


def test_a_server_that_starts_with_a_clock_far_ahead_waits_a_day_though_runs_are_heard_of_by_it(shelf) -> None:
    clocks = Clocks(now=BEGIN + DAY_S)
    shelf.append(frame(1, state("finished", time=BEGIN), rows({"loss": [1.0]}, [1]), run="yesterday"))
    shelf.compact()
    policy = {"runs_days": 30, "samples_days": 30, "events_days": 30}
    retention_at(shelf, clocks, **policy).run_once()
    clocks = Clocks(now=BEGIN + 400 * DAY_S, up=10.0)
    say_hello(shelf, clocks.now)
    started = retention_at(shelf, clocks, **policy)
    for hours in (1, 22):
        clocks.pass_by(hours * 3600)
        started.run_once()
    assert (runs_left(shelf), started.counters["refused"]) == (["alive", "yesterday"], 2)
    assert len(list(shelf.store.samples("yesterday"))) == 1
    assert "400 days ahead" in started.preview().refused
    right = Clocks(now=BEGIN + 2 * DAY_S, up=10.0)
    mended = retention_at(shelf, right, **policy)  # a person has set the clock right, and started it again
    mended.run_once()
    assert mended.counters["refused"] == 0
    clocks.pass_by(3 * 3600)
    say_hello(shelf, clocks.now)
    started.run_once()  # nobody did: that is the right time
    assert runs_left(shelf) == ["alive"]
    clocks.pass_by(3600)
    started.run_once()
    assert started.counters["refused"] == 2


def test_most_runs_go_at_once_only_after_a_day_in_which_somebody_can_see_it(shelf) -> None:
    clocks = Clocks(now=BEGIN + 60 * DAY_S)
    shelf.append(*(frame(1, state("finished", time=BEGIN), run=f"old{number}") for number in range(25)))
    say_hello(shelf, clocks.now)
    retention = retention_at(shelf, clocks, runs_days=30)
    retention.run_once()
    clocks.pass_by(23 * 3600)
    retention.run_once()
    assert (len(runs_left(shelf)), retention.counters["refused"]) == (26, 2)
    clocks.pass_by(2 * 3600)
    retention.run_once()
    assert runs_left(shelf) == ["alive"]


@pytest.mark.sqlite
@pytest.mark.parametrize("scope", [Scope("p"), Scope(None, ("q",))])
@pytest.mark.parametrize("kind", ["block", "bundle"])
def test_what_is_old_is_found_by_an_index(shelf, kind: str, scope: Scope) -> None:
    search = old_blocks(scope, BEGIN, 0.0) if kind == "block" else old_bundles(scope, BEGIN)
    sql = str(search.limit(9).compile(shelf.database.engine, compile_kwargs={"literal_binds": True}))
    with shelf.database.read() as connection:
        plan = connection.connection.cursor().execute(f"EXPLAIN QUERY PLAN {sql}")
        said = " ".join(row[3] for row in plan.fetchall())
    assert f"ix_{kind}_last_time" in said
    assert "TEMP B-TREE" not in said


@pytest.mark.blocks
@pytest.mark.sqlite
def test_blocks_are_thinned_in_short_jobs_of_the_writer_and_none_when_nothing_is_due(shelf) -> None:
    shelf.append(*(frame(seq, rows({f"m{seq}": [1.0] * 3000}, range(3000))) for seq in range(1, 151)))
    shelf.compact()
    say_hello(shelf, BEGIN + 40 * DAY_S)
    statements: list[str] = []
    watch = sqlite_calls(shelf.database, statements)
    Retention(
        shelf.database, shelf.store, RetentionPolicy(samples_days=50), clock=lambda: BEGIN + 41 * DAY_S
    ).run_once()
    assert not [sql for sql in statements if "block" in sql], "nothing is old"
    retention = Retention(
        shelf.database, shelf.store, RetentionPolicy(samples_days=30), clock=lambda: BEGIN + 41 * DAY_S
    )
    retention.run_once()
    watch()
    assert not [sql for sql in statements if "FROM block" in sql and "EXISTS" not in sql], (
        "the writer looks for nothing"
    )
    assert retention.counters["blocks_thinned"] == 450
    jobs = [0]
    for sql in statements:
        if sql.startswith("UPDATE block"):
            jobs[-1] += 1
        elif sql.startswith(("COMMIT", "RELEASE")) and jobs[-1]:
            jobs.append(0)
    updates = [count for count in jobs if count]
    assert (sum(updates), max(updates)) == (450, BLOCKS_AT_ONCE)


@pytest.mark.blocks
def test_a_run_that_was_tagged_meanwhile_keeps_its_samples(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0] * 1500}, range(1500))))
    shelf.compact()
    with shelf.database.read() as connection:
        old = [row[:4] for row in connection.execute(old_blocks(Scope(None), BEGIN + DAY_S, 0.0)).all()]
    change = update(tables.run).values(tags='["keep"]')
    shelf.database.write(lambda connection: connection.execute(change))
    thinned = shelf.database.write(lambda connection: _thin_blocks(connection, old, BEGIN + DAY_S, Scope(None)))
    assert (thinned, len(list(shelf.store.samples("r1")))) == (0, 1500)


@pytest.mark.blocks
def test_a_block_that_new_samples_reached_meanwhile_keeps_them(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0] * 1500}, range(1500))))
    shelf.compact()
    with shelf.database.read() as connection:
        found = connection.execute(old_blocks(Scope(None), BEGIN + DAY_S, 0.0)).all()
        old = [row[:4] for row in found]
    shelf.append(frame(2, rows({"loss": [2.0]}, [1501], [BEGIN + 40 * DAY_S])))
    shelf.compact()
    thinned = shelf.database.write(lambda connection: _thin_blocks(connection, old, BEGIN + DAY_S))
    assert thinned == len(old) - 1
    assert [row.step for row in shelf.store.samples("r1")][-1] == 1501
