"""Samples in ClickHouse when something goes wrong: each counts once, and nothing that was acknowledged is lost."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import clickhouse_server
import numpy as np
import pytest
from command_line import command
from data_folder import data_folder
from frames import BEGIN, frame, rows

from perfagent.errors import ConfigError, ResourceError
from perfagent.wire import Group
from perfagent_server.database import open_database
from perfagent_server.settings import Settings
from perfagent_server.store.clickhouse import rollups
from perfagent_server.store.clickhouse.compaction import ClickHouseCompactor
from perfagent_server.store.clickhouse.connection import Away
from perfagent_server.store.clickhouse.marks import batches_of, keep_batches, marks_of
from perfagent_server.store.clickhouse.schema import VERSION
from perfagent_server.store.opening import open_store
from perfagent_server.store.retention import DAY_S, Retention, RetentionPolicy

pytestmark = pytest.mark.clickhouse


def counted(shelf, run: str = "r1", name: str = "loss") -> int:
    return sum(shelf.store.series(run, name, points=10).count)


def in_clickhouse(shelf, where: str = "1") -> int:
    clickhouse = shelf.compactor._clickhouse
    return int(clickhouse.run(f"SELECT count() FROM {clickhouse.address.database}.sample WHERE {where}"))


def after_sending(shelf, monkeypatch, happens) -> None:
    """`happens` is called when a batch is in ClickHouse, and before SQL knows."""
    send = ClickHouseCompactor._send

    def sent(self, packed, number: int) -> None:
        send(self, packed, number)
        happens()

    monkeypatch.setattr(ClickHouseCompactor, "_send", sent)


def fail() -> None:
    raise Away("no answer in time")


def test_a_batch_that_ended_in_doubt_counts_once_and_is_removed_later(shelf, monkeypatch) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0, 3.0]}, [0, 1, 2])))
    with monkeypatch.context() as patched:
        after_sending(shelf, patched, fail)
        with pytest.raises(Away):
            shelf.compact()
    assert in_clickhouse(shelf) == 3
    assert counted(shelf) == 3  # those of the tail
    assert shelf.compact() == 1
    assert in_clickhouse(shelf) == 6
    assert counted(shelf) == 3
    assert shelf.compactor.counters["dead_batches"] == 1
    now = shelf.compactor._clock()
    shelf.compactor._clock = lambda: now + 2 * 3600
    shelf.compact()
    assert in_clickhouse(shelf) == 3
    assert counted(shelf) == 3


def test_a_server_that_dies_between_insert_and_commit_leaves_nothing_twice(shelf, place, monkeypatch) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0, 3.0]}, [0, 1, 2])))

    def die() -> None:
        raise KeyboardInterrupt  # no handler of ours runs: what is pending stays pending

    with monkeypatch.context() as patched:
        after_sending(shelf, patched, die)
        patched.setattr(ClickHouseCompactor, "_give_up", lambda self: None)
        with pytest.raises(KeyboardInterrupt):
            shelf.compact()
    store, compactor, _ = open_store(shelf.database, place.metrics, rules_enabled=False)
    assert compactor.run_once(everything=True) == 1
    assert in_clickhouse(shelf) == 6
    assert sum(store.series("r1", "loss").count) == 3


def test_who_reads_between_insert_and_commit_sees_each_sample_once(shelf, monkeypatch) -> None:
    seen = []
    shelf.append(frame(1, rows({"loss": [1.0, 2.0, 3.0]}, [0, 1, 2])))
    after_sending(shelf, monkeypatch, lambda: seen.append(counted(shelf)))
    shelf.compact()
    assert seen == [3]
    assert counted(shelf) == 3


def test_the_same_insert_twice_is_taken_once(shelf, monkeypatch) -> None:
    send = ClickHouseCompactor._send

    def twice(self, packed, number: int) -> None:
        send(self, packed, number)
        send(self, packed, number)

    monkeypatch.setattr(ClickHouseCompactor, "_send", twice)
    shelf.append(frame(1, rows({"loss": [1.0, 2.0, 3.0]}, [0, 1, 2])))
    shelf.compact()
    assert in_clickhouse(shelf) == 3


def test_a_run_of_the_same_name_has_nothing_of_the_deleted_one(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0] * 9000}, range(9000))))
    shelf.append(frame(2, rows({"loss": [1.0] * 9000}, range(9000, 18_000))))
    shelf.compact()
    shelf.store.delete("r1")
    shelf.append(frame(1, rows({"loss": [7.0]}, [3]), source="another"))
    assert shelf.store.series("r1", "loss").mean == [7.0]
    shelf.compact()
    assert shelf.store.series("r1", "loss", points=1).mean == [7.0]
    shelf.compact()
    assert in_clickhouse(shelf) == 1
    assert (
        int(shelf.compactor._clickhouse.run(f"SELECT count() FROM {shelf.compactor._clickhouse.address.database}.cell"))
        == 0
    )


def test_a_run_that_is_deleted_while_its_samples_are_sent_stays_deleted(shelf, monkeypatch) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [0, 1])), frame(1, rows({"loss": [5.0]}, [0]), run="r2"))
    with monkeypatch.context() as patched:
        after_sending(shelf, patched, lambda: shelf.store.delete("r1") if shelf.store.names("r1") else None)
        shelf.compact()
    assert shelf.store.series("r2", "loss").mean == [5.0]
    assert shelf.store.series("r1", "loss").count == []


def test_odd_bits_come_out_as_they_went_in(shelf) -> None:
    bits = [0x7FF8000000000001, 0xFFF80000DEADBEEF, 0x8000000000000000, 1, 0x7FF0000000000000, 0x3FF0000020000000]
    values = np.array(bits, "<u8").view("<f8")
    shelf.append(frame(1, rows({"loss": [0.0] * 6}, range(6))))
    stamp = np.full(6, BEGIN).tobytes()
    sent = frame(2, Group(np.arange(6, 12, dtype="<i8").tobytes(), stamp, stamp, {"loss": values.tobytes()}))
    shelf.append(sent)
    shelf.compact()
    found = np.array([row.value for row in shelf.store.samples("r1")][6:])
    assert found.view("<u8").tolist() == bits


def test_long_charts_come_from_cells_and_count_what_comes_late(shelf) -> None:
    value = np.random.default_rng(1).standard_normal(40_000)
    for at in range(0, 40_000, 10_000):
        shelf.append(frame(1 + at, rows({"loss": value[at : at + 10_000]}, range(at, at + 10_000))))
        shelf.compact()
    shelf.append(frame(2, rows({"loss": [-100.0, math.inf]}, [17, 18])))
    shelf.compact()
    clickhouse = shelf.compactor._clickhouse
    assert int(clickhouse.run(f"SELECT count() FROM {clickhouse.address.database}.cell WHERE level = 16")) >= 2000
    answer = shelf.store.series("r1", "loss", points=100)
    assert answer.bucket_steps == 512
    assert sum(answer.count) == 40_002
    assert sum(answer.nonfinite) == 1
    assert answer.min[0] == -100.0
    assert answer.min[1:] == [value[at : at + 512].min() for at in range(512, 40_000, 512)]


def test_late_samples_are_looked_for_until_they_are_in_cells(shelf, monkeypatch) -> None:
    def rollup():
        with shelf.database.read() as connection:
            return marks_of(connection, "r1").rollups[1]

    def send(seq: int, first: int, end: int) -> None:
        shelf.append(frame(seq, rows({"loss": np.ones(end - first)}, range(first, end))))
        shelf.compact()

    send(1, 0, 10_000)
    assert (rollup().step, rollup().is_whole) == (4096, True)
    send(2, 100, 101)
    assert not rollup().is_whole
    assert counted(shelf) == 10_001
    send(3, 10_000, 20_000)
    assert (rollup().step, rollup().is_whole) == (12_288, True)
    assert counted(shelf) == 20_001

    keep = rollups._keep

    def kept_after_another_batch(connection, **wanted) -> None:
        batches = batches_of(connection)
        batches.newest += 1
        keep_batches(connection, batches)
        keep(connection, **wanted)

    monkeypatch.setattr(rollups, "_keep", kept_after_another_batch)
    send(4, 20_000, 30_000)
    assert not rollup().is_whole


def test_retention_keeps_charts_exact_and_drops_the_samples(shelf) -> None:
    value = np.random.default_rng(1).standard_normal(5000)
    shelf.append(frame(1, rows({"loss": value}, range(5000))))
    shelf.compact()
    before = shelf.store.series("r1", "loss", points=200)
    now = BEGIN + 40 * DAY_S
    shelf.append(frame(2, rows({"loss": [1.0]}, [0], [now])), now=now)
    shelf.append(frame(1, rows({"loss": [1.0]}, [0], [now]), run="alive"), now=now)
    shelf.compactor._clock = lambda: now
    kept = RetentionPolicy(samples_days=30)
    retention = Retention(
        shelf.database, shelf.store, kept, clock=lambda: now, uptime=lambda: now, thin_elsewhere=shelf.compactor.thin
    )
    retention.run_once()
    assert in_clickhouse(shelf) == 5000  # who began to read before still needs them
    now += 3600
    retention.run_once()
    assert in_clickhouse(shelf) == 0
    after = shelf.store.series("r1", "loss", points=200)
    assert after.count[1:] == before.count[1:]
    assert (after.min[1:], after.max[1:]) == (before.min[1:], before.max[1:])
    assert after.count[0] == before.count[0] + 1  # the one that came late
    assert [row.step for row in shelf.store.samples("r1")] == [0]
    shelf.append(frame(3, rows({"loss": [5.0]}, [4])), now=now)
    shelf.compact()
    assert sum(shelf.store.series("r1", "loss", points=200).count) == 5002


def test_a_database_says_where_its_samples_are(shelf) -> None:
    shelf.append(frame(1, rows({"loss": [1.0]}, [0])))
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
    assert compactor.is_behind
    assert compactor.counters["away"] == 1
    assert "2 samples wait in the database" in compactor.trouble
    assert store.latest("r1")["loss"].value == 4.0
    with pytest.raises(Away):
        store.series("r1", "loss")
    engine = clickhouse_server.Engine(tmp_path / "engine", engine.port)
    assert compactor.run_once(everything=True) == 1
    assert (compactor.trouble, compactor.is_behind) == ("", False)
    assert store.series("r1", "loss").mean == [0.0, 1.0, 2.0, 3.0, 4.0]
    engine.stop()


def test_rows_that_are_newer_than_a_restored_database_are_removed(shelf, place) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [0, 1])))
    shelf.compact()
    with shelf.database.read() as connection:
        saved = batches_of(connection)
    shelf.append(frame(2, rows({"loss": [3.0]}, [2])))
    shelf.compact()
    assert in_clickhouse(shelf) == 3
    shelf.database.write(lambda connection: keep_batches(connection, saved))  # as a backup of that moment has it
    store, compactor, _ = open_store(shelf.database, place.metrics, rules_enabled=False)
    shelf.append(frame(3, rows({"loss": [4.0]}, [3])))
    compactor.run_once(everything=True)
    assert in_clickhouse(shelf) == 3
    assert [row.value for row in store.samples("r1")] == [1.0, 2.0, 4.0]


def test_samples_of_another_database_are_not_touched(shelf, place, tmp_path) -> None:
    shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [0, 1])))
    shelf.compact()
    other = open_database(Settings(data=data_folder(tmp_path / "other")))
    try:
        store, compactor, _ = open_store(other, place.metrics, rules_enabled=False)
        sent = frame(1, rows({"loss": [5.0]}, [0]))
        other.write(lambda connection: store.append_in(connection, [sent], BEGIN))
        with pytest.raises(ResourceError, match="samples of another perfagent database"):
            compactor.run_once(everything=True)
    finally:
        other.close()
    assert in_clickhouse(shelf) == 2


def test_db_upgrade_makes_the_tables_and_copy_says_where_samples_stay(shelf, place, tmp_path, capsys) -> None:
    ended = command(capsys, "db", "upgrade", "--data", str(tmp_path / "new"), "--metrics", str(place.metrics))
    assert ended.code == 0
    assert f"is at schema version {VERSION}" in ended.out
    if place.database is not None:
        return
    shelf.append(frame(1, rows({"loss": [1.0, 2.0]}, [0, 1])))
    shelf.compact()
    shelf.database.close()
    source, target = place.data / "perfagent.db", tmp_path / "copy" / "perfagent.db"
    target.parent.mkdir()
    ended = command(capsys, "db", "copy", f"sqlite:///{source}", f"sqlite:///{target}")
    assert "Its samples stay in ClickHouse at" in ended.out
    copy = open_database(Settings(data=target.parent))
    try:
        store, _, _ = open_store(copy, place.metrics, rules_enabled=False)
        assert store.series("r1", "loss").mean == [1.0, 2.0]
    finally:
        copy.close()
    ended = command(capsys, "db", "backup", str(tmp_path / "saved.db"), "--data", str(target.parent))
    assert "Most samples are in ClickHouse and not in this file" in ended.out
