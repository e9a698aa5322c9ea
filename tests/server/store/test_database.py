"""A database in a file: its writer, its log, a full disk, what must not be opened, and migrations."""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import until
from frames import BEGIN, frame, rows
from sqlalchemy import insert, select, text

from perfagent.errors import ConfigError
from perfagent_server import schema
from perfagent_server.database import Database, QueueFull, StorageFull, open_database, sqlite
from perfagent_server.database.sqlite import sqlite_engine
from perfagent_server.store import tables
from perfagent_server.store.sql import SqlStore


@pytest.fixture
def place(tmp_path: Path) -> SimpleNamespace:
    """A folder without a database: what makes one is the subject here."""
    return SimpleNamespace(data=tmp_path / "data", database=None)


def opened(place, **options) -> closing[Database]:
    return closing(open_database(place, **{"reserve_bytes": 1 << 12, **options}))


def file_of(place) -> Path:
    """The file of a database that was opened once."""
    opened(place).__exit__()
    return place.data / "perfagent.db"


@contextmanager
def locked(place) -> Iterator[sqlite3.Connection]:
    """Another program has the lock for writing."""
    with closing(sqlite3.connect(place.data / "perfagent.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


def mark(name: str):
    return lambda connection: connection.execute(insert(tables.cursor).values(name=name, tail_id=1))


def marks(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.execute(select(tables.cursor.c.name)).scalars())


def pragma(database: Database, name: str):
    with database.read() as connection:
        return connection.exec_driver_sql(f"PRAGMA {name}").scalar()


@pytest.mark.sql
def test_waiting_jobs_share_a_commit_and_fail_alone(place) -> None:
    """A future resolves after the commit; what waits is bounded."""
    with opened(place, max_waiting=3) as database:
        gate = threading.Event()
        blocker = database.submit(lambda connection: gate.wait(10))
        until(lambda: database.waiting == 0)
        before = database.commits
        good, bad, more = (database.submit(job) for job in (mark("a"), lambda one: (mark("b")(one), 1 / 0), mark("c")))
        with pytest.raises(QueueFull, match="3 are allowed"):
            database.submit(mark("d"))
        seen: list[set[str]] = []
        good.add_done_callback(lambda _: seen.append(marks(database)))
        gate.set()
        for future in (blocker, good, more):
            future.result(10)
        with pytest.raises(ZeroDivisionError):
            bad.result(10)
        until(lambda: database.commits == before + 2)
        assert seen == [{"a", "c"}]
    with pytest.raises(QueueFull, match="being closed"):
        database.submit(mark("d"))


@pytest.mark.fault
def test_s04_a_lock_that_stays_refuses_writes_by_its_cause(place) -> None:
    with opened(place, patience_s=0.2) as database:
        with locked(place):
            assert marks(database) == set()  # reading goes on
            with pytest.raises(QueueFull, match="another program"):
                database.write(mark("a"))
        database.write(mark("b"))
        assert marks(database) == {"b"}


def test_files_are_private_and_connections_durable(place) -> None:
    with opened(place) as database:
        assert (place.data / "perfagent.db-wal").stat().st_size >= sqlite.LOG_BYTES, "before the first write"
        database.write(mark("a"))
        assert stat.S_IMODE(place.data.stat().st_mode) == 0o700
        assert {stat.S_IMODE(file.stat().st_mode) for file in place.data.iterdir()} == {0o600}
        names = ("journal_mode", "synchronous", "foreign_keys", "auto_vacuum", "cache_size", "busy_timeout")
        assert [pragma(database, name) for name in names] == ["wal", 2, 1, 2, -4096, 5000]


@pytest.mark.fault
def test_s02_a_full_disk_refuses_new_data_and_recovers(place, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's own limit of pages stands for a full disk: it fails with the same SQLITE_FULL."""
    with opened(place, reserve_bytes=1 << 16) as database:
        store = SqlStore(database)

        def send(seq: int, size: int):
            piece = rows({"loss": [float(seq)] * size}, range(size))
            return database.write(lambda connection: store.append_in(connection, [frame(seq, piece)], BEGIN))[0]

        def fill(connection) -> None:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()
            connection.exec_driver_sql(f"PRAGMA max_page_count={pages + 2}")

        send(1, 10)
        reserve = place.data / "reserve-for-a-full-disk"
        assert reserve.stat().st_size == 1 << 16
        free = [0]
        monkeypatch.setattr(sqlite.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
        database.write(fill)
        with pytest.raises(StorageFull, match="delete runs"):
            send(2, 10_000)
        assert (database.full, reserve.exists()) == (True, False)
        with pytest.raises(StorageFull):
            send(3, 1)
        assert len(list(store.samples("r1"))) == 10  # reads go on
        database.write(mark("alert"), essential=True)  # and so do deletions and alerts, in the room of the reserve
        free[0] = 1 << 30
        assert send(2, 10).stored == 10  # the frame that was refused, sent again
        assert (database.full, reserve.stat().st_size) == (False, 1 << 16)
        assert len(list(store.samples("r1"))) == 20
        assert pragma(database, "quick_check") == "ok"


def refusal(place) -> str:
    with pytest.raises(ConfigError) as refused:
        open_database(place)
    return str(refused.value)


@pytest.mark.fault
@pytest.mark.parametrize("damage", ["header", "page", "text"])
def test_s03_a_damaged_file_is_refused_by_name(place, damage: str) -> None:
    path = file_of(place)
    data = bytearray(path.read_bytes())
    if damage == "header":
        data[:16] = b"not a database!!"
    elif damage == "page":
        data[4096:] = os.urandom(len(data) - 4096)
    else:
        data = bytearray(b"hello\n" * 2000)
    path.write_bytes(data)
    for word in ("perfagent.db is damaged", "perfagent db restore"):
        assert word in refusal(place)


@pytest.mark.fault
def test_s03_what_cannot_be_written_is_refused_by_name(place) -> None:
    if os.geteuid() != 0:  # root may write everywhere
        path = file_of(place)
        path.chmod(0o400)
        assert "cannot be written" in refusal(place)
    blocked = SimpleNamespace(data=place.data / "file" / "data", database=None)
    place.data.mkdir(exist_ok=True)
    (place.data / "file").write_text("a file stands where the folder should be")
    for word in (str(blocked.data), "cannot be written", "--data"):
        assert word in refusal(blocked)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("foo", ("sqlite:////path",)),
        ("mysql://u:hidden@host/name", ("SQLite or PostgreSQL", "mysql")),
        ("sqlite://", ("in memory",)),
    ],
)
def test_an_address_that_cannot_be_used_is_refused(tmp_path: Path, given: str, words: tuple[str, ...]) -> None:
    said = refusal(SimpleNamespace(data=tmp_path, database=given))
    assert all(word in said for word in words), said
    assert "hidden" not in said


def test_the_migrations_make_exactly_the_tables_of_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compared as SQLite's own CREATE statements, so that options such as WITHOUT ROWID count too, but not the order of
    constraints. No file in the working directory is needed."""
    monkeypatch.chdir(tmp_path)

    def made(path: Path, build) -> dict[str, list[str]]:
        engine = sqlite_engine(path)
        build(engine)
        with engine.connect() as connection:
            found = connection.execute(text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL")).all()
        engine.dispose()
        own = {name: sql for name, sql in found if not name.startswith(("alembic", "sqlite_"))}
        return {name: sorted(sql.replace(",", " ").split()) for name, sql in own.items()}

    migrated = made(tmp_path / "migrated.db", lambda engine: schema.upgrade(engine, "x"))
    declared = made(tmp_path / "declared.db", tables.metadata.create_all)
    assert migrated.keys() == declared.keys()
    for name in declared:
        assert migrated[name] == declared[name]
