"""Tests of PostgreSQL alone: readers see one state of the data, one server writes, broken connections are made anew."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import postgresql_server
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from api_builders import ADMIN, api, send
from builders import until
from commands import perfagent
from data_folder import data_folder
from frames import BEGIN, frame, rows, state
from sqlalchemy import Connection, insert, make_url, select, text

from perfagent.errors import ConfigError, ResourceError
from perfagent_server.database import Database, QueueFull, StorageError, Unreachable, open_database, postgresql, writer
from perfagent_server.store.copying import copy_all
from perfagent_server.store.interface import Batch
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.statements import Prepared
from perfagent_server.store.tables import cursor, metadata, run, tail
from perfagent_server.store.write.compaction import Compactor

pytestmark = pytest.mark.postgresql
Place = SimpleNamespace


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(data=tmp_path, database=postgresql_server.database_of(tmp_path))


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    opened = open_database(place, alone=True)
    yield opened
    opened.close()


def mark(name: str, value: int = 1) -> Any:
    return lambda connection: connection.execute(insert(cursor).values(name=name, tail_id=value)) and None


def marks(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.execute(select(cursor.c.name)).scalars())


def cut(place: Place) -> None:
    """Ends every connection to the database, as a restart of PostgreSQL would."""
    name = str(place.database).partition("?")[0].rpartition("/")[2]
    postgresql_server.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)


def test_the_migrations_make_the_tables_of_the_metadata(place: Place) -> None:
    empty = Place(data=place.data, database=postgresql_server.empty_database("perfagent_migrated"))
    opened = open_database(empty)
    with opened.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata) == []
    opened.close()


def test_all_queries_of_a_reading_see_one_state(database: Database) -> None:
    database.write(mark("before"))
    with database.read() as connection:
        first = connection.execute(select(cursor.c.name)).scalars().all()
        database.write(mark("meanwhile"))
        assert connection.execute(select(cursor.c.name)).scalars().all() == first
    assert marks(database) == {"before", "meanwhile"}


def test_a_reading_cannot_write(database: Database) -> None:
    with pytest.raises(StorageError), database.read() as connection:
        connection.execute(insert(cursor).values(name="x", tail_id=1))


def test_a_second_server_does_not_start(database: Database, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgresql, "_FREED_S", 0.0)
    with pytest.raises(ResourceError, match="another server uses the database"):
        open_database(place, alone=True)
    open_database(place).close()  # a command, such as `perfagent keys create`, may


def test_a_start_waits_for_a_server_that_is_about_to_end(database: Database, place: Place) -> None:
    ending = threading.Timer(0.5, database.close)
    ending.start()
    open_database(place, alone=True).close()
    ending.join()


def test_s04_connections_that_were_cut_are_made_anew(database: Database, place: Place) -> None:
    database.write(mark("before"))
    cut(place)
    assert marks(database) == {"before"}
    database.write(mark("after"))
    assert marks(database) == {"before", "after"}


def test_lines_that_end_on_a_cut_connection_close_their_cursor(database: Database, place: Place) -> None:
    """Else psycopg warns of it once it is collected."""
    names = Prepared(select(cursor.c.name))
    for name in ("a", "b"):
        database.write(mark(name))
    with pytest.raises(Unreachable), database.read() as connection:
        lines = names.stream(connection, {})
        assert (next(lines), next(lines)) == (("a",), ("b",))
        cut(place)
        next(lines)
    del lines
    gc.collect()


def test_a_connection_cut_within_a_job_runs_it_again(database: Database, place: Place) -> None:
    runs = []

    def job(connection: Connection) -> None:
        runs.append(1)
        mark("once")(connection)
        if len(runs) == 1:
            cut(place)
            connection.execute(select(1))

    database.write(job)
    assert (len(runs), marks(database)) == (2, {"once"})


def test_a_connection_cut_before_the_commit_tells_the_caller_and_runs_nothing_again(
    database: Database, place: Place
) -> None:
    runs, forgotten = [], []
    database.on_rollback.append(lambda: forgotten.append(1))

    def job(connection: Connection) -> None:
        runs.append(1)
        mark("unsure")(connection)
        cut(place)

    with pytest.raises(Unreachable, match="send again later"):
        database.write(job)
    assert (len(runs), len(forgotten), marks(database)) == (1, 1, set())
    database.write(mark("next"))
    assert marks(database) == {"next"}


def until_free(database: str) -> None:
    """Waits until PostgreSQL has freed the lock of a server that has ended."""
    locks = "FROM pg_locks JOIN pg_database ON pg_database.oid = database WHERE locktype = 'advisory' AND datname = %s"
    name = make_url(database).database
    until(lambda: not postgresql_server.ask(f"SELECT 1 {locks}", name), why="a server still has the database")


def test_a_server_that_lost_the_database_to_another_one_writes_no_more(
    database: Database, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.3)
    database.write(mark("first"))
    with postgresql_server.paused(str(place.database)):  # nobody connects
        cut(place)
    successor = open_database(place, alone=True)
    with pytest.raises(Unreachable, match="another server uses the database"):
        database.write(mark("stray"))
    successor.write(mark("second"))
    assert marks(successor) == {"first", "second"}
    successor.close()
    until_free(place.database)
    database.write(mark("third"))
    assert marks(database) == {"first", "second", "third"}


def test_a_job_that_fails_leaves_its_neighbors_alone(database: Database) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def first(connection: Connection) -> None:
        begun.set()
        may_end.wait(10)

    held = database.submit(first)
    begun.wait(10)
    futures = [database.submit(mark(name)) for name in ("a", "a", "b")]  # the second breaks the primary key
    may_end.set()
    held.result()
    assert [type(future.exception()).__name__ for future in futures] == ["NoneType", "IntegrityError", "NoneType"]
    assert marks(database) == {"a", "b"}


def test_what_is_closed_is_not_opened_again_by_a_late_reader(place: Place) -> None:
    opened = open_database(place)
    opened.close()
    with pytest.raises(Unreachable, match="closed"), opened.read():
        pass


def test_an_address_where_nobody_listens_is_told_without_the_password(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="cannot be reached") as caught:
        open_database(Place(data=tmp_path, database="postgresql://user:very-secret@127.0.0.1:1/perfagent"))
    assert "very-secret" not in str(caught.value)


def test_a_missing_driver_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "perfagent_server.database.postgresql", None)
    with pytest.raises(ConfigError, match=r"psycopg.*\.\[postgresql\]"):
        open_database(Place(data=tmp_path, database="postgresql://user@127.0.0.1/perfagent"))


def test_what_a_script_says_with_a_nul_is_stored_without_it(database: Database) -> None:
    store = SqlStore(database)
    sent = frame(
        1, rows({"loss": [1.0]}, [1]), state("starting", host="a\0b", tags=["x\0"], pid=2**40, world_size=2**40)
    )
    ended = frame(2, state("failed", reason="KeyError: '\0'"))
    receipts = database.write(lambda connection: store.append_in(connection, [sent, ended], BEGIN))
    assert [receipt.stored for receipt in receipts] == [1, 0]
    with database.read() as connection:
        found = connection.execute(select(run.c.host, run.c.reason, run.c.world_size)).one()
    assert found == ("a\ufffdb", "KeyError: '\ufffd'", 1)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/api/v1/channels", '{"name": "a\\u0000b", "kind": "webhook", "url": "https://example.org/"}'),
        ("POST", "/api/v1/silences", '{"run": "r", "for_s": 60, "note": "a\\u0000"}'),
        ("GET", "/api/v1/runs?q=a%00b", None),
        ("GET", "/api/v1/runs?tag=a%00b", None),
        ("GET", "/api/v1/runs/a%00b", None),
    ],
)
def test_a_nul_in_a_request_is_refused_with_a_sentence(
    place: Place, tmp_path: Path, method: str, path: str, body: str | None
) -> None:
    with api(tmp_path, database=place.database) as client:
        answer = client.request(
            method, path, content=body, headers={**ADMIN, **({"Content-Type": "application/json"} if body else {})}
        )
        assert answer.status_code == 400, answer.text
        assert "NUL" in answer.json()["error"]["message"]


def test_requests_get_503_while_postgresql_is_away_and_go_on_after(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE_S", 0.3)
    row = {"project": "p", "run": "r", "step": 1, "metrics": {"loss": 1.0}}
    with api(tmp_path, database=place.database) as client:
        assert client.post("/api/v1/log", json=row).status_code == 200
        with postgresql_server.paused(str(place.database)):
            cut(place)
            for answer in (client.post("/api/v1/log", json={**row, "step": 2}), client.get("/api/v1/runs")):
                assert answer.status_code == 503, answer.text
                assert int(answer.headers["Retry-After"]) > 0
            assert client.get("/readyz").status_code == 503
        assert client.get("/readyz").status_code == 200, "before anybody writes"
        assert client.post("/api/v1/log", json={**row, "step": 2}).status_code == 200
        [found] = client.get("/api/v1/runs").json()["runs"]
        assert client.get(f"/api/v1/runs/{found['run']}/latest").json()["loss"]["step"] == 2


def test_everything_is_copied_from_sqlite_and_back_bit_by_bit(place: Place, database: Database, tmp_path: Path) -> None:
    laptop = open_database(Place(data=data_folder(tmp_path / "laptop"), database=None))
    store, compactor = SqlStore(laptop), Compactor(laptop, rules_enabled=False)
    for seq in range(1, 40):
        steps = range(seq * 50, seq * 50 + 50)
        values = {"loss": [float("nan") if step % 97 == 0 else step / 3 for step in steps], "lr": [1e-3] * 50}
        made = frame(seq, rows(values, steps), state("starting", name="gpt", config={"lr": 1e-3}))
        laptop.write(lambda connection, made=made: store.append_in(connection, [made], BEGIN))
        if seq == 30:
            compactor.run_once(everything=True)
    copied = copy_all(laptop, database)
    assert copied > 40
    with pytest.raises(ResourceError, match="is not empty: "):
        copy_all(laptop, database)
    back = open_database(Place(data=data_folder(tmp_path / "back"), database=None))
    assert copy_all(database, back) == copied
    told = [[repr(row) for row in SqlStore(one).samples("r1")] for one in (laptop, database, back)]
    assert told[0] == told[1] == told[2]
    assert len(told[0]) == 39 * 100
    # ids go on behind the copied ones
    more = frame(40, rows({"loss": [0.5]}, [9999]))
    [receipt] = database.write(lambda connection: SqlStore(database).append_in(connection, [more], BEGIN))
    with laptop.read() as connection:
        assert (
            receipt.tail_id
            == connection.execute(select(tail.c.id).order_by(tail.c.id.desc()).limit(1)).scalar_one() + 1
        )
    laptop.close()
    back.close()


def test_the_command_copies_and_says_what_it_did(place: Place, tmp_path: Path) -> None:
    laptop = open_database(Place(data=data_folder(tmp_path / "laptop"), database=None))
    made = frame(1, rows({"loss": [0.5]}, [1]))
    laptop.write(lambda connection: SqlStore(laptop).append_in(connection, [made], BEGIN))
    laptop.close()
    url = f"sqlite:///{tmp_path}/laptop/perfagent.db"
    done = perfagent(tmp_path, "db", "copy", url, place.database)
    assert done.returncode == 0, done.stderr
    assert "run: 1 row" in done.stdout
    again = perfagent(tmp_path, "db", "copy", url, place.database)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    missing = perfagent(tmp_path, "db", "copy", f"sqlite:///{tmp_path}/nothing.db", place.database)
    assert missing.returncode == 1
    assert "there is no database" in missing.stderr


def test_the_tail_of_a_copy_goes_on_behind_the_cursor_of_the_rules(
    place: Place, database: Database, tmp_path: Path
) -> None:
    """Else the rules would pass over the next frames: all that were judged and compacted are gone from the tail."""
    laptop = open_database(Place(data=data_folder(tmp_path / "laptop"), database=None))
    store = SqlStore(laptop)
    for seq in range(1, 6):
        made = frame(seq, rows({"loss": [0.5]}, [seq]))
        laptop.write(lambda connection, made=made: store.append_in(connection, [made], BEGIN))
    laptop.write(mark("rules", 5))
    Compactor(laptop).run_once(everything=True)
    back = open_database(Place(data=data_folder(tmp_path / "back"), database=None))
    copy_all(laptop, database)
    copy_all(database, back)
    for one in (database, back):
        more = frame(6, rows({"loss": [0.5]}, [6]))
        [receipt] = one.write(lambda connection, one=one, more=more: SqlStore(one).append_in(connection, [more], BEGIN))
        assert receipt.tail_id is not None
        assert receipt.tail_id > 5
    laptop.close()
    back.close()


def test_errors_of_statements_that_go_straight_to_the_driver_are_known(place: Place, database: Database) -> None:
    slow = Prepared(text("SELECT pg_sleep(5)"))

    def job(connection: Connection) -> None:
        connection.execute(text("SET LOCAL statement_timeout = 50"))
        slow.all(connection, {})

    with pytest.raises(QueueFull):
        database.write(job)
    with pytest.raises(QueueFull), database.read() as connection:
        job(connection)


def test_what_was_rejected_is_told_also_when_the_store_had_to_try_again(place: Place, database: Database) -> None:
    store, tries = SqlStore(database), []
    made = frame(1, rows({"loss": [1.0], "x" * 300: [1.0]}, [1]))

    def take() -> Batch:
        tries.append(1)
        if len(tries) == 2:
            postgresql_server.ask_in(str(place.database), "DROP TRIGGER cut ON tail")
        return Batch([made], BEGIN)

    database.write(lambda connection: connection.execute(text(
        "CREATE FUNCTION cut() RETURNS trigger AS $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NEW; END $$ "
        "LANGUAGE plpgsql"
    )) and None)  # fmt: skip
    database.write(
        lambda connection: (
            connection.execute(text("CREATE TRIGGER cut BEFORE INSERT ON tail EXECUTE FUNCTION cut()")) and None
        )
    )
    [receipt] = store.append(take).result(30)
    assert len(tries) == 2
    assert [one.name for one in receipt.rejected] == ["x" * 300]


def test_a_tag_that_postgresql_cannot_read_hides_no_other(place: Place, tmp_path: Path) -> None:
    with api(tmp_path, database=place.database) as client:
        for name, tags in (("a", ["x\0", "good"]), ("b", ["\u00e9"])):
            made = frame(1, rows({"loss": [1.0]}, [1]), state("starting", tags=tags), run=name)
            send(client, made)
        told = {
            tag: [run["run"] for run in client.get("/api/v1/runs", params={"tag": tag}).json()["runs"]]
            for tag in ("good", "\u00e9")
        }
        assert told == {"good": ["a"], "\u00e9": ["b"]}


def test_an_expression_that_only_re2_knows_is_refused_with_a_sentence(place: Place, tmp_path: Path) -> None:
    with api(tmp_path, database=place.database) as client:
        send(client, frame(1, rows({"loss": [1.0]}, [1]), run="r1"))
        found = client.get("/api/v1/runs", params={"with": "", "q": "/^R[0-9]$/"}).json()["runs"]
        assert [one["run"] for one in found] == ["r1"]
        refused = client.get("/api/v1/runs", params={"with": "", "q": "/(?P<x>r)1/"})
        assert (refused.status_code, "of PostgreSQL" in refused.json()["error"]["message"]) == (422, True)
