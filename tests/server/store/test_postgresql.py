"""Tests of PostgreSQL alone: readers see one state of the data, one server writes, broken connections are made anew."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import postgresql_server
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from api_builders import ADMIN, api, send
from builders import until
from data_folder import data_folder
from frames import BEGIN, frame, rows, state
from sqlalchemy import Connection, func, insert, make_url, select

from perfagent.errors import ResourceError
from perfagent_server.database import Database, StorageError, Unreachable, open_database
from perfagent_server.store.copying import copy_all
from perfagent_server.store.interface import Receipt
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.tables import cursor, metadata, run, tail
from perfagent_server.store.write.compaction import Compactor

pytestmark = [pytest.mark.postgresql, pytest.mark.sql]
Place = SimpleNamespace


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(data=tmp_path, database=postgresql_server.database_of(tmp_path))


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    with closing(open_database(place, alone=True, patience_s=0.3)) as opened:
        yield opened


def mark(name: str, value: int = 1) -> Any:
    return lambda connection: connection.execute(insert(cursor).values(name=name, tail_id=value)) and None


def marks(database: Database) -> set[str]:
    with database.read() as connection:
        return set(connection.execute(select(cursor.c.name)).scalars())


def cut(place: Place) -> None:
    """Ends every connection to the database, as a restart of PostgreSQL would."""
    name = make_url(place.database).database
    postgresql_server.ask("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", name)


def stored(database: Database, *frames: Any) -> list[Receipt]:
    return database.write(lambda connection: SqlStore(database).append_in(connection, frames, BEGIN))


def loss(seq: int, **more: Any) -> Any:
    return frame(seq, rows({"loss": [0.5]}, [seq]), **more)


def laptop(folder: Path) -> closing[Database]:
    """A database of SQLite."""
    return closing(open_database(Place(data=data_folder(folder), database=None)))


def test_the_migrations_make_the_tables_of_the_metadata(place: Place) -> None:
    empty = Place(data=place.data, database=postgresql_server.empty_database("perfagent_migrated"))
    with closing(open_database(empty)) as opened, opened.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), metadata) == []
    with pytest.raises(Unreachable, match="closed"), opened.read():
        pass  # a late reader opens nothing again


def test_a_reading_sees_one_state_and_cannot_write(database: Database) -> None:
    database.write(mark("before"))
    with database.read() as connection:
        first = connection.execute(select(cursor.c.name)).scalars().all()
        database.write(mark("meanwhile"))
        assert connection.execute(select(cursor.c.name)).scalars().all() == first
    assert marks(database) == {"before", "meanwhile"}
    with pytest.raises(StorageError), database.read() as connection:
        connection.execute(insert(cursor).values(name="x", tail_id=1))


def test_a_second_server_does_not_start_and_a_command_may(database: Database, place: Place) -> None:
    with pytest.raises(ResourceError, match="another server uses the database"):
        open_database(place, alone=True, patience_s=0.0)
    open_database(place).close()  # such as `perfagent keys create`
    ending = threading.Timer(0.5, database.close)
    ending.start()
    open_database(place, alone=True).close()  # it waits for one that is about to end
    ending.join()


@pytest.mark.parametrize("when", ["within the job", "before the commit"])
def test_a_connection_cut_in_a_job_tells_or_tries_again(database: Database, place: Place, when: str) -> None:
    """Before the commit nobody knows what was stored: the caller is told, and nothing runs again."""
    runs, forgotten = [], []
    database.on_rollback.append(lambda: forgotten.append(1))

    def job(connection: Connection) -> None:
        runs.append(1)
        mark("once")(connection)
        if len(runs) == 1:
            cut(place)
            if when == "within the job":
                connection.execute(select(1))

    if when == "within the job":
        database.write(job)
        assert (len(runs), marks(database)) == (2, {"once"})
        return
    with pytest.raises(Unreachable, match="send again later"):
        database.write(job)
    assert (len(runs), len(forgotten), marks(database)) == (1, 1, set())
    database.write(mark("next"))
    assert marks(database) == {"next"}


def test_a_server_that_lost_the_database_writes_no_more(database: Database, place: Place) -> None:
    """While another one has it."""
    database.write(mark("first"))
    with postgresql_server.paused(str(place.database)):  # nobody connects
        cut(place)
    with closing(open_database(place, alone=True)) as successor:
        with pytest.raises(Unreachable, match="another server uses the database"):
            database.write(mark("stray"))
        successor.write(mark("second"))
        assert marks(successor) == {"first", "second"}
    locks = "FROM pg_locks JOIN pg_database ON pg_database.oid = database WHERE locktype = 'advisory' AND datname = %s"
    name = make_url(place.database).database
    until(lambda: not postgresql_server.ask(f"SELECT 1 {locks}", name), why="a server still has the database")
    database.write(mark("third"))
    assert marks(database) == {"first", "second", "third"}


def test_requests_get_503_while_postgresql_is_away(place: Place, tmp_path: Path) -> None:
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


def test_an_address_where_nobody_listens_hides_its_password(tmp_path: Path) -> None:
    nobody = Place(data=tmp_path, database="postgresql://user:very-secret@127.0.0.1:1/perfagent")
    with pytest.raises(ResourceError, match="cannot be reached") as caught:
        open_database(nobody)
    assert "very-secret" not in str(caught.value)


def test_what_a_script_says_with_a_nul_is_stored_without_it(database: Database) -> None:
    large = state("starting", host="a\0b", tags=["x\0"], pid=2**40, world_size=2**40)
    receipts = stored(database, loss(1), frame(2, large, state("failed", reason="KeyError: '\0'")))
    assert [receipt.stored for receipt in receipts] == [1, 0]
    with database.read() as connection:
        found = connection.execute(select(run.c.host, run.c.reason, run.c.world_size)).one()
    assert found == ("a\ufffdb", "KeyError: '\ufffd'", 1)


def test_what_postgresql_cannot_hold_or_read_is_told(place: Place, tmp_path: Path) -> None:
    """A NUL in a request, a tag with one, and an expression that only RE2 knows."""
    refused: list[tuple[str, str, str | None]] = [
        ("POST", "channels", '{"name": "a\\u0000b", "kind": "webhook", "url": "https://example.org/"}'),
        ("POST", "silences", '{"run": "r", "for_s": 60, "note": "a\\u0000"}'),
        *(("GET", path, None) for path in ("runs?q=a%00b", "runs?tag=a%00b", "runs/a%00b")),
    ]
    with api(tmp_path, database=place.database) as client:
        for method, path, body in refused:
            headers = {**ADMIN, **({"Content-Type": "application/json"} if body else {})}
            answer = client.request(method, f"/api/v1/{path}", content=body, headers=headers)
            assert (answer.status_code, "NUL" in answer.json()["error"]["message"]) == (400, True), answer.text
        for name, tags in (("r1", ["x\0", "good"]), ("r2", ["\u00e9"])):
            send(client, frame(1, state("starting", tags=tags), run=name))

        def found(**asked: str) -> Any:
            return [one["run"] for one in client.get("/api/v1/runs", params=asked).json()["runs"]]

        assert (found(tag="good"), found(tag="\u00e9")) == (["r1"], ["r2"]), "a tag it cannot read hides no other"
        assert found(**{"with": "", "q": "/^R[1]$/"}) == ["r1"]
        answer = client.get("/api/v1/runs", params={"with": "", "q": "/(?P<x>r)1/"})
        assert (answer.status_code, "of PostgreSQL" in answer.json()["error"]["message"]) == (422, True)


def test_all_is_copied_from_sqlite_and_back_bit_by_bit(database: Database, tmp_path: Path) -> None:
    """The tail of a copy goes on behind its ids, and behind the cursor of the rules where all of it is compacted: else the
    rules would pass over the next frames."""
    with laptop(tmp_path / "laptop") as source, laptop(tmp_path / "back") as back:
        compactor = Compactor(source, rules_enabled=False)
        for seq in range(1, 40):
            steps = range(seq * 50, seq * 50 + 50)
            values = {"loss": [float("nan") if step % 97 == 0 else step / 3 for step in steps], "lr": [1e-3] * 50}
            stored(source, frame(seq, rows(values, steps), state("starting", name="gpt", config={"lr": 1e-3})))
            if seq == 30:
                compactor.run_once(everything=True)
        source.write(mark("rules", 45))
        copied = copy_all(source, database)
        assert copied > 40
        with pytest.raises(ResourceError, match="is not empty"):
            copy_all(source, database)
        assert copy_all(database, back) == copied
        of_each = [[repr(row) for row in SqlStore(one).samples("r1")] for one in (source, database, back)]
        assert of_each[0] == of_each[1] == of_each[2]
        assert len(of_each[0]) == 39 * 100
        with source.read() as connection:
            assert connection.execute(select(func.max(tail.c.id))).scalar_one() == 39
        for one in (database, back):
            [receipt] = stored(one, loss(40))
            assert (receipt.tail_id or 0) > 45
