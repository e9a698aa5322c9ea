from __future__ import annotations

import os
import resource
import sqlite3
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import until
from frames import BEGIN, frame, rows
from sqlalchemy import insert, select, text

from perfagent.errors import ConfigError
from perfagent.wire import MAX_NAME_BYTES
from perfagent_server import schema
from perfagent_server.database import Database, QueueFull, StorageFull, open_database, sqlite, writer
from perfagent_server.database.sqlite import sqlite_engine
from perfagent_server.store import tables
from perfagent_server.store.sql import SqlStore


@pytest.fixture
def place(tmp_path: Path) -> SimpleNamespace:
    """A folder without a database: what makes one is the subject here."""
    return SimpleNamespace(data=tmp_path / "data", database=None)


def mark(name: str):
    return lambda connection: connection.execute(insert(tables.cursor).values(name=name, tail_id=1))


def marks(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.execute(select(tables.cursor.c.name)).scalars())


def test_jobs_that_wait_together_share_one_commit_and_one_failure_is_its_own(database: Database) -> None:
    gate = threading.Event()
    blocker = database.submit(lambda connection: gate.wait(10))
    until(lambda: database.waiting == 0)
    before = database.commits
    good = database.submit(mark("a"))
    bad = database.submit(lambda connection: (mark("b")(connection), 1 / 0))
    more = database.submit(mark("c"))
    gate.set()
    for future in (blocker, good, more):
        future.result(10)
    with pytest.raises(ZeroDivisionError):
        bad.result(10)
    assert marks(database) == {"a", "c"}
    until(lambda: database.commits == before + 2)


def test_a_future_resolves_after_the_commit(database: Database) -> None:
    seen: list[set[str]] = []
    future = database.submit(mark("a"))
    future.add_done_callback(lambda _: seen.append(marks(database)))
    future.result(10)
    until(lambda: seen)
    assert seen == [{"a"}]


def test_the_queue_is_bounded(place) -> None:
    database = open_database(place, reserve_bytes=1 << 12, max_waiting=2)
    gate = threading.Event()
    first = database.submit(lambda connection: gate.wait(10))
    until(lambda: database.waiting == 0)
    kept = [database.submit(mark(name)) for name in "ab"]
    with pytest.raises(QueueFull, match="2 are allowed; send again later"):
        database.submit(mark("c"))
    gate.set()
    for future in (first, *kept):
        future.result(10)
    database.close()
    with pytest.raises(QueueFull, match="being closed"):
        database.submit(mark("d"))


def test_a_second_writer_delays_ours_and_nothing_is_lost(database: Database, place) -> None:
    other = sqlite3.connect(place.data / "perfagent.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    future = database.submit(mark("a"))
    assert marks(database) == set()  # reading goes on
    other.execute("COMMIT")
    future.result(20)
    assert marks(database) == {"a"}
    other.close()


@pytest.mark.fault
def test_s04_a_lock_that_is_not_released_refuses_writes_and_names_the_cause(
    place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LOCK_PATIENCE_S", 0.2)
    monkeypatch.setattr(writer, "PATIENCE_S", 0.2)
    database = open_database(place, reserve_bytes=1 << 12)
    other = sqlite3.connect(place.data / "perfagent.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(QueueFull, match="another program has kept the database locked"):
        database.write(mark("a"))
    other.execute("ROLLBACK")
    database.write(mark("b"))
    assert marks(database) == {"b"}
    other.close()
    database.close()


def test_files_are_private(database: Database, place) -> None:
    database.write(mark("a"))
    assert stat.S_IMODE(place.data.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in place.data.iterdir()} == {0o600}


def test_every_connection_is_durable_and_consistent(database: Database) -> None:
    with database.read() as connection:
        found = {
            name: connection.execute(text(f"PRAGMA {name}")).scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "auto_vacuum")
        }
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "auto_vacuum": 2}


# --- the log ----------------------------------------------------------------------------------------------------------


def log_bytes(place) -> int:
    return (place.data / "perfagent.db-wal").stat().st_size


def test_the_log_has_its_size_before_the_first_write_and_the_database_stays_small(place) -> None:
    database = open_database(place, reserve_bytes=1 << 12)
    try:
        grown = log_bytes(place)
        assert grown >= sqlite.LOG_BYTES
        database.write(mark("a"))
        assert log_bytes(place) == grown
        with database.read() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            assert connection.exec_driver_sql("PRAGMA freelist_count").scalar() == 0
            names = connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars().all()
            settings = [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("cache_size", "busy_timeout")
            ]
        assert pages * 4096 < 2**20
        assert "perfagent_log_growth" not in names
        assert settings == [-4096, 5000]
    finally:
        database.close()


def test_a_log_that_is_large_enough_is_left_alone(place) -> None:
    first = open_database(place, reserve_bytes=1 << 12)
    grown = log_bytes(place)
    second = open_database(place, reserve_bytes=1 << 12)
    assert log_bytes(place) == grown
    second.close()
    first.close()


@pytest.mark.fault
def test_a_log_that_cannot_grow_keeps_nobody_from_starting(place) -> None:
    open_database(place, reserve_bytes=1 << 12).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, hard))
    try:
        database = open_database(place, reserve_bytes=1 << 12)
        database.write(mark("a"))
        assert log_bytes(place) <= 2_000_000
        assert marks(database) == {"a"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    database.close()


@pytest.mark.fault
def test_another_programs_lock_does_not_hold_up_the_start(place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "LOCK_PATIENCE_S", 60.0)
    open_database(place, reserve_bytes=1 << 12).close()
    other = sqlite3.connect(place.data / "perfagent.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begin = time.monotonic()
    database = open_database(place, reserve_bytes=1 << 12)
    assert time.monotonic() - begin < 30
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA busy_timeout").scalar() == 60_000
    assert log_bytes(place) < sqlite.LOG_BYTES
    other.execute("ROLLBACK")
    database.write(mark("a"))
    database.close()
    other.close()


# --- a full disk ------------------------------------------------------------------------------------------------------


class SmallDisk:
    """SQLite's own limit of pages stands for a full disk: it fails with the same SQLITE_FULL."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def limit(self, more_pages: int) -> None:
        def job(connection):
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages + more_pages}")

        self.database.write(job)


def test_the_reserve_of_an_older_version_takes_the_name_that_says_what_it_is(place) -> None:
    open_database(place, reserve_bytes=1 << 12).close()
    (place.data / "reserve-for-a-full-disk").rename(place.data / "ballast")
    open_database(place, reserve_bytes=1 << 12).close()
    assert (place.data / "reserve-for-a-full-disk").stat().st_size == 1 << 12
    assert not (place.data / "ballast").exists()


@pytest.mark.fault
def test_s02_a_full_disk_refuses_new_data_keeps_reads_and_recovers(place, monkeypatch: pytest.MonkeyPatch) -> None:
    database = open_database(place, reserve_bytes=1 << 16)
    store = SqlStore(database)

    def send(seq: int, size: int):
        piece = rows({"loss": [float(seq)] * size}, range(size))
        return database.write(lambda connection: store.append_in(connection, [frame(seq, piece)], BEGIN))[0]

    send(1, 10)
    reserve = place.data / "reserve-for-a-full-disk"
    assert reserve.stat().st_size == 1 << 16
    free = [0]
    monkeypatch.setattr(sqlite.shutil, "disk_usage", lambda path: type("Usage", (), {"free": free[0]})())
    SmallDisk(database).limit(2)
    with pytest.raises(StorageFull, match="free some space or delete runs"):
        send(2, 10_000)
    assert database.full
    assert not reserve.exists()
    with pytest.raises(StorageFull):
        send(3, 1)
    assert len(list(store.samples("r1"))) == 10  # reads go on
    database.write(mark("alert"), essential=True)  # and so do deletions and alerts, in the room of the reserve
    free[0] = 1 << 30
    assert send(2, 10).stored == 10  # the frame that was refused, sent again
    assert not database.full
    assert reserve.stat().st_size == 1 << 16
    assert len(list(store.samples("r1"))) == 20
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA quick_check").scalar() == "ok"
    database.close()


# --- what must not be opened ------------------------------------------------------------------------------------------


def closed(place) -> Path:
    open_database(place, reserve_bytes=1 << 12).close()
    return place.data / "perfagent.db"


@pytest.mark.fault
def test_s03_a_newer_schema_is_refused_by_name(place) -> None:
    path = closed(place)
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num='9999'")
    connection.close()
    with pytest.raises(ConfigError, match=r"perfagent\.db has schema version '9999'.*upgrade perfagent"):
        open_database(place)


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["header", "page", "text"])
def test_s03_a_damaged_file_is_refused_by_name(place, damage: str) -> None:
    path = closed(place)
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[:16] = b"not a database!!"
    elif damage == "page":
        data[4096:] = os.urandom(len(data) - 4096)
    else:
        data = bytearray(b"hello\n" * 2000)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"perfagent\.db is damaged.*perfagent db restore"):
        open_database(place)


@pytest.mark.fault
def test_s03_a_folder_that_cannot_be_written_is_refused_by_name(place, tmp_path: Path) -> None:
    place.data.parent.mkdir(exist_ok=True)
    place.data.write_text("a file stands where the folder should be")
    with pytest.raises(ConfigError, match=r"data folder .*data cannot be written .*--data"):
        open_database(place)


@pytest.mark.fault
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_s03_a_read_only_file_is_refused_by_name(place) -> None:
    path = closed(place)
    path.chmod(0o400)
    with pytest.raises(ConfigError, match="cannot be written"):
        open_database(place)


def test_a_database_in_memory_is_refused(tmp_path: Path) -> None:
    place = type("Place", (), {"data": tmp_path, "database": "sqlite://"})()
    with pytest.raises(ConfigError, match="lives in memory"):
        open_database(place)


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ("foo", "sqlite:////path"),
        ("mysql://u:hidden@host/name", "must be SQLite or PostgreSQL, .*: mysql is not supported"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_words(tmp_path: Path, given: str, word: str) -> None:
    place = type("Place", (), {"data": tmp_path, "database": given})()
    with pytest.raises(ConfigError, match=word) as refused:
        open_database(place)
    assert "hidden" not in str(refused.value)


# --- migrations -------------------------------------------------------------------------------------------------------


def test_the_migrations_make_exactly_the_tables_of_the_metadata(tmp_path: Path) -> None:
    """Compared as SQLite's own CREATE statements, so that options such as WITHOUT ROWID count too, but not the order of
    constraints."""

    def made(path: Path, build) -> dict[str, list[str]]:
        engine = sqlite_engine(path)
        build(engine)
        with engine.connect() as connection:
            found = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
        engine.dispose()
        return {
            name: sorted(sql.replace(",", " ").split())
            for name, sql in found
            if not name.startswith(("alembic", "sqlite_"))
        }

    migrated = made(tmp_path / "migrated.db", lambda engine: schema.upgrade(engine, "x"))
    declared = made(tmp_path / "declared.db", tables.metadata.create_all)
    assert migrated.keys() == declared.keys()
    for name in declared:
        assert migrated[name] == declared[name]


def test_every_column_of_a_project_takes_the_longest_name() -> None:
    columns = [table.c.project for table in tables.metadata.tables.values() if "project" in table.c]
    assert columns
    assert {column.table.name: column.type.length for column in columns} == dict.fromkeys(
        (column.table.name for column in columns), MAX_NAME_BYTES
    )


def test_migrations_need_no_file_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = sqlite_engine(tmp_path / "x.db")
    schema.upgrade(engine, "x")
    with engine.connect() as connection:
        assert schema.current(connection) == schema.head()
    engine.dispose()


def test_an_upgrade_changes_nothing_the_second_time(place) -> None:
    path = closed(place)
    before = path.read_bytes()
    closed(place)
    assert path.read_bytes() == before
