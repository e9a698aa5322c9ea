from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from data_folder import place_of
from frames import BEGIN

from perfagent.wire import Frame
from perfagent_server.database import Database, open_database
from perfagent_server.store.interface import Check, Receipt
from perfagent_server.store.opening import open_store
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.samples import SampleCompactor
from perfagent_server.store.sql import SqlStore


@dataclass(frozen=True)
class Place:
    """Where a test's data lies: all of Settings that open_database() and open_store() look at."""

    data: Path
    database: str | None = None
    metrics: str | None = None


@dataclass
class Shelf:
    """A store on a real file, with its compactor driven by hand."""

    database: Database
    store: SqlStore
    compactor: SampleCompactor
    thin: Callable[[Scope, float, Check], int] | None
    """What drops full resolution of samples that are not in the database."""

    def append(self, *frames: Frame, now: float = BEGIN) -> list[Receipt]:
        return self.database.write(lambda connection: self.store.append_in(connection, frames, now))

    def compact(self) -> int:
        return self.compactor.run_once(everything=True)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(**place_of(tmp_path / "data"))


@pytest.fixture
def database(place: Place) -> Iterator[Database]:
    opened = open_database(place, reserve_bytes=1 << 16)
    yield opened
    opened.close()


@pytest.fixture
def shelf(place: Place, database: Database) -> Shelf:
    return Shelf(database, *open_store(database, place.metrics, rules_enabled=False))
