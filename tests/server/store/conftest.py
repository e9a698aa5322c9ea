from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from data_folder import data_folder
from frames import BEGIN

from perfagent.wire import Frame
from perfagent_server.database import Database, open_database
from perfagent_server.store.interface import Receipt
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import Compactor


@dataclass(frozen=True)
class Place:
    """Where a test's database lies: all of Settings that open_database() looks at."""

    data: Path
    database: str | None = None


@dataclass
class Shelf:
    """A store on a real file, with its compactor driven by hand."""

    database: Database
    store: SqlStore
    compactor: Compactor

    def append(self, *frames: Frame, now: float = BEGIN) -> list[Receipt]:
        return self.database.write(lambda connection: self.store.append(connection, frames, now))

    def compact(self) -> int:
        return self.compactor.run_once(everything=True)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(data_folder(tmp_path / "data"))


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    opened = open_database(place, reserve_bytes=1 << 16)
    yield opened
    opened.close()


@pytest.fixture
def shelf(database: Database) -> Shelf:
    return Shelf(database, SqlStore(database), Compactor(database, rules_enabled=False))
