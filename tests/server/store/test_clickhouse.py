"""Samples in ClickHouse when something goes wrong: each counts once, and nothing that was acknowledged is lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import clickhouse_server
import numpy as np
import pytest
from frames import BEGIN, frame, rows

from perfagent.errors import ConfigError
from perfagent_server.store.clickhouse.connection import Address, Away, ClickHouse
from perfagent_server.store.opening import open_store
from perfagent_server.store.retention import DAY_S

pytestmark = [pytest.mark.clickhouse, pytest.mark.real]
STORES = 3
"""The job of a first batch that makes it count: one looks what is pending, one gives the number, then it is sent."""


@pytest.fixture
def clickhouse(place) -> Iterator[ClickHouse]:
    with closing(ClickHouse(Address.parse(place.metrics))) as opened:
        yield opened


def in_clickhouse(clickhouse: ClickHouse, where: str = "1", table: str = "sample") -> int:
    return int(clickhouse.run(f"SELECT count() FROM {clickhouse.address.database}.{table} WHERE {where}"))


def counted(shelf, run: str = "r1") -> int:
    return sum(shelf.store.series(run, "loss", points=10).count)


def send(shelf, seq: int, values: Any, steps: Any = None, **more: Any) -> None:
    shelf.append(frame(seq, rows({"loss": values}, range(len(values)) if steps is None else steps), **more))


def fail() -> None:
    raise Away("no answer in time")


def test_a_batch_in_doubt_counts_once_and_is_removed_later(shelf, clickhouse) -> None:
    send(shelf, 1, [1.0, 2.0, 3.0])
    with shelf.before_job(fail, STORES), pytest.raises(Away):
        shelf.compact()
    assert (in_clickhouse(clickhouse), counted(shelf)) == (3, 3)  # those of the tail
    assert shelf.compact() == 1
    assert (in_clickhouse(clickhouse), counted(shelf)) == (6, 3)
    assert shelf.compactor.counters["dead_batches"] == 1
    shelf.now += 2 * 3600
    shelf.compact()
    assert (in_clickhouse(clickhouse), counted(shelf)) == (3, 3)


def test_a_server_that_dies_before_the_commit_doubles_nothing(shelf, place, clickhouse) -> None:
    send(shelf, 1, [1.0, 2.0, 3.0])

    def die() -> None:
        raise KeyboardInterrupt  # no handler of ours runs: what is pending stays pending

    with shelf.before_job(die, STORES), pytest.raises(KeyboardInterrupt):
        shelf.compact()
    store, compactor, _ = open_store(shelf.database, place.metrics, rules_enabled=False)
    assert compactor.run_once(everything=True) == 1
    assert (in_clickhouse(clickhouse), sum(store.series("r1", "loss").count)) == (6, 3)


def test_a_run_of_the_same_name_has_nothing_of_the_deleted_one(shelf, clickhouse) -> None:
    send(shelf, 1, [1.0] * 9000)
    send(shelf, 2, [1.0] * 9000, range(9000, 18_000))
    shelf.compact()
    shelf.store.delete("r1")
    send(shelf, 1, [7.0], [3], source="another")
    for _ in range(2):
        assert shelf.mean(points=1) == [7.0]
        shelf.compact()
    shelf.compact()
    assert (in_clickhouse(clickhouse), in_clickhouse(clickhouse, table="cell")) == (1, 0)


def test_long_charts_come_from_cells_and_count_what_comes_late(shelf, clickhouse) -> None:
    value = np.random.default_rng(1).standard_normal(40_000)
    for at in range(0, 40_000, 10_000):
        send(shelf, 1 + at, value[at : at + 10_000], range(at, at + 10_000))
        shelf.compact()
    send(shelf, 2, [-100.0, math.inf], [17, 18])
    shelf.compact()
    assert in_clickhouse(clickhouse, "level = 16", "cell") >= 2000
    answer = shelf.store.series("r1", "loss", points=100)
    assert (answer.bucket_steps, sum(answer.count), sum(answer.nonfinite)) == (512, 40_002, 1)
    assert answer.min == [-100.0] + [value[at : at + 512].min() for at in range(512, 40_000, 512)]


def test_retention_keeps_charts_exact_and_drops_the_samples(shelf, clickhouse) -> None:
    send(shelf, 1, np.random.default_rng(1).standard_normal(5000))
    shelf.compact()
    before = shelf.store.series("r1", "loss", points=200)
    shelf.now = BEGIN + 40 * DAY_S
    for run in ("r1", "alive"):
        shelf.append(frame(2, rows({"loss": [1.0]}, [0], [shelf.now]), run=run))
    retention = shelf.retention(samples_days=30)
    retention.run_once()
    assert in_clickhouse(clickhouse) == 5000  # who began to read before still needs them
    shelf.pass_by(3600)
    retention.run_once()
    assert in_clickhouse(clickhouse) == 0
    after = shelf.store.series("r1", "loss", points=200)
    assert (after.count[1:], after.min[1:], after.max[1:]) == (before.count[1:], before.min[1:], before.max[1:])
    assert after.count[0] == before.count[0] + 1  # the one that came late
    assert shelf.samples() == [(0, 1.0)]
    send(shelf, 3, [5.0], [4])
    shelf.compact()
    assert sum(shelf.store.series("r1", "loss", points=200).count) == 5002


def test_a_database_says_where_its_samples_are(shelf) -> None:
    send(shelf, 1, [1.0])
    shelf.compact()
    with pytest.raises(ConfigError, match=r"in ClickHouse at 127\.0\.0\.1:\d+/perfagent_\w+; name it with --metrics"):
        open_store(shelf.database, None)


def test_away_and_back(tmp_path: Path, database) -> None:
    engine = clickhouse_server.Engine(tmp_path / "engine")
    store, compactor, _ = open_store(database, f"{engine.url}/fleet", rules_enabled=False)
    compactor.policy = replace(compactor.policy, most_waiting=2)

    def append(seq: int, *steps: int) -> None:
        sent = frame(seq, rows({"loss": [float(step) for step in steps]}, steps))
        database.write(lambda connection: store.append_in(connection, [sent], BEGIN))

    append(1, 0, 1, 2)
    compactor.run_once(everything=True)
    engine.stop()
    append(2, 3, 4)
    with pytest.raises(Away) as caught:
        compactor.run_once(everything=True)
    assert caught.value.retry_after_s > 0
    assert (compactor.is_behind, compactor.counters["away"]) == (True, 1)
    assert "2 samples wait" in compactor.trouble
    assert store.latest("r1")["loss"].value == 4.0
    with pytest.raises(Away):
        store.series("r1", "loss")
    engine = clickhouse_server.Engine(tmp_path / "engine", engine.port)
    assert compactor.run_once(everything=True) == 1
    assert (compactor.trouble, compactor.is_behind) == ("", False)
    assert store.series("r1", "loss").mean == [0.0, 1.0, 2.0, 3.0, 4.0]
    engine.stop()
