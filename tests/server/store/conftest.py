from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from data_folder import place_of
from frames import BEGIN
from sqlalchemy import func, select

from perfagent.wire import Frame
from perfagent_server.database import Database, open_database
from perfagent_server.store import tables
from perfagent_server.store.interface import Check, Receipt
from perfagent_server.store.opening import open_store
from perfagent_server.store.retention import Retention, RetentionPolicy
from perfagent_server.store.retention.policy import Scope
from perfagent_server.store.samples import SampleCompactor
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.write.compaction import CompactionPolicy, Compactor


@dataclass(frozen=True)
class Place:
    """Where a test's data lies: all of Settings that open_database() and open_store() look at."""

    data: Path
    database: str | None = None
    metrics: str | None = None


class Shelf:
    """A store on a real file, with its compactor driven by hand. now: the wall clock of the compactor and of retention;
    up: the clock that nobody sets."""

    def __init__(self, database: Database, metrics: str | None) -> None:
        self.now, self.up = BEGIN, 1000.0
        self.database = database
        self.store: SqlStore
        self.compactor: SampleCompactor
        self.thin: Callable[[Scope, float, Check], int] | None
        self.store, self.compactor, self.thin = open_store(
            database, metrics, rules_enabled=False, clock=lambda: self.now
        )

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.up += seconds

    def append(self, *frames: Frame, now: float | None = None) -> list[Receipt]:
        """now: when they came."""
        came = self.now if now is None else now
        return self.database.write(lambda connection: self.store.append_in(connection, frames, came))

    def compact(self) -> int:
        return self.compactor.run_once(everything=True)

    def compactor_of(self, **policy: Any) -> Compactor:
        """Another compactor, of blocks."""
        made = CompactionPolicy(**policy)
        return Compactor(self.database, rules_enabled=False, policy=made, clock=lambda: self.now)

    def retention(self, on_deleted: Callable[[str], None] = lambda _: None, **policy: Any) -> Retention:
        return Retention(
            self.database, self.store, RetentionPolicy(**policy), clock=lambda: self.now, uptime=lambda: self.up,
            thin_elsewhere=self.thin, on_deleted=on_deleted,
        )  # fmt: skip

    def execute(self, statement: Any) -> None:
        self.database.write(lambda connection: connection.execute(statement) and None)

    def ask(self, query: Any) -> list[Any]:
        """Rows, or bare values where the query is for one column."""
        with self.database.read() as connection:
            return [row[0] if len(row) == 1 else tuple(row) for row in connection.execute(query)]

    def count(self, table: Any) -> int:
        return int(self.ask(select(func.count()).select_from(table))[0])

    def runs(self) -> list[str]:
        return sorted(self.ask(select(tables.run.c.id)))

    def samples(self, run: str = "r1", name: str = "loss") -> list[tuple[int, float]]:
        """(step, value) of a series, of all ranks."""
        return [(row.step, row.value) for row in self.store.samples(run) if row.name == name]

    def mean(self, name: str = "loss", run: str = "r1", **how: Any) -> list[float]:
        return self.store.series(run, name, **how).mean

    @contextlib.contextmanager
    def before_job(self, happens: Callable[[], object], number: int = 1) -> Iterator[None]:
        """`happens` is called before the `number`-th job from now on is handed to the writer: what others do between a
        look at the data and what comes of it."""
        submit, jobs = self.database.submit, itertools.count(1)

        def then(job: Any, **options: Any) -> Any:
            if next(jobs) == number:
                happens()
            return submit(job, **options)

        self.database.submit = then  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.database.submit  # type: ignore[method-assign]


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
    return Shelf(database, place.metrics)
