"""No valid key is refused because the server is just reading its keys."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from data_folder import place_of
from sqlalchemy import Connection

from perfagent_server.database import Database, open_database
from perfagent_server.security.keys import Keys
from perfagent_server.settings import Settings

PEPPER = "a pepper of the tests"


class HeldReads:
    """A database whose reads end when they are told to."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.held, self.go = threading.Event(), threading.Event()
        self.go.set()

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        with self._database.read() as connection:
            yield connection
            self.held.set()
            assert self.go.wait(60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[HeldReads]:
    opened = open_database(Settings(**place_of(tmp_path)))
    yield HeldReads(opened)
    opened.close()


def test_while_keys_are_read_only_an_unknown_key_waits(database: HeldReads) -> None:
    here, elsewhere = Keys(database, PEPPER), Keys(database, PEPPER)  # type: ignore[arg-type]
    _, known = elsewhere.create("read")
    _, new = here.create("ingest")
    assert not Keys(database, PEPPER).must_load(new), "keys are known from the start"  # type: ignore[arg-type]
    elsewhere.changed()
    database.held.clear()
    database.go.clear()
    with ThreadPoolExecutor(3) as senders:
        first = senders.submit(elsewhere.find, new)
        assert database.held.wait(60)
        others = [senders.submit(elsewhere.find, new) for _ in range(2)]
        try:
            assert elsewhere.find(known) is not None
            assert elsewhere.must_load(new), "the next one must not be asked on the event loop"
            _, made = elsewhere.create("ingest")
        finally:
            database.go.set()
        assert all(sender.result(timeout=60) is not None for sender in (first, *others))
    assert elsewhere.find(made) is not None, "one that is made meanwhile is not forgotten"
