"""Group commits: those who send at the same time share one, and each run has its turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import until
from data_folder import place_of
from frames import frame, rows

from perfagent_server.database import Database, QueueFull, StorageFull, open_database
from perfagent_server.ingest.fair_queue import MAX_FRAMES_OF_RUN
from perfagent_server.ingest.group_commit import Ingest
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.stored import Stored


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    with closing(open_database(SimpleNamespace(**place_of(tmp_path)), reserve_bytes=1 << 12)) as opened:
        yield opened


@pytest.fixture
def ingest(database: Database) -> Ingest:
    return Ingest(SqlStore(database))


@contextmanager
def busy(database: Database) -> Iterator[threading.Event]:
    """The writer has something else to do until the event is set."""
    gate = threading.Event()
    blocker = database.submit(lambda _: gate.wait(10))
    until(lambda: database.waiting == 0)
    yield gate
    gate.set()
    blocker.result(10)


def piece(seq: int, rank: int = 0, run: str = "r1"):
    return frame(seq, rows({"loss": [1.0, 2.0]}, [2 * seq, 2 * seq + 1]), rank=rank, run=run)


def sending(ingest: Ingest, *frames) -> list[asyncio.Task]:
    return [asyncio.create_task(ingest.accept([one])) for one in frames]


async def stored(*tasks: asyncio.Task) -> list[int]:
    return [receipt.stored for task in tasks for receipt in await task]


@pytest.mark.fault
def test_s06_a_frame_is_stored_before_a_backlog_that_came_first(database: Database, ingest: Ingest) -> None:
    """The mechanism; benchmarks/ingest/noisy.py measures what it does for others."""
    commits: list[list[str]] = []
    ingest.on_commit.append(lambda stored: commits.append([item.run for item in stored]))

    async def send(gate: threading.Event) -> None:
        backlog = sending(ingest, *(piece(seq, run="noisy") for seq in range(1, 601)))
        await asyncio.sleep(0)
        others = sending(ingest, *(piece(1, rank, "quiet") for rank in range(20)))
        gone = sending(ingest, piece(2, run="quiet"))[0]
        await asyncio.sleep(0)
        gone.cancel()  # a sender that left disturbs nobody
        gate.set()
        assert await stored(*others) == [2] * 20
        assert await stored(*backlog) == [2] * 600

    with busy(database) as gate:
        asyncio.run(send(gate))
    assert (commits[0].count("noisy"), commits[0].count("quiet")) == (MAX_FRAMES_OF_RUN, 21)
    assert sum(map(len, commits)) == 621
    assert (ingest.counters["commits"], ingest.counters["samples"]) == (len(commits), 2 * 621)
    assert ingest.accept_and_wait([piece(2, run="quiet")])[0].duplicate == 2  # stored all the same


@pytest.mark.fault
def test_s05_too_many_waiting_frames_are_refused_at_once(database: Database) -> None:
    """A run may fill a quarter of what may wait."""
    ingest = Ingest(SqlStore(database), max_waiting=8)

    async def send(gate: threading.Event) -> None:
        tasks = sending(ingest, piece(1, run="noisy"), piece(2, run="noisy"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 frames of run 'noisy' wait already, 2"):
            await ingest.accept([piece(3, run="noisy")])
        tasks += sending(ingest, *(piece(1, run=f"r{number}") for number in range(6)))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="8 frames wait already, 8"):
            await ingest.accept([piece(4)])
        gate.set()
        assert await stored(*tasks) == [2] * 8
        assert await stored(*sending(ingest, piece(4))) == [2]

    with busy(database) as gate:
        asyncio.run(send(gate))
    assert (ingest.waiting, ingest.counters["refused_frames"]) == (0, 2)


@pytest.mark.fault
def test_s05_a_refusal_of_the_database_reaches_every_sender(database: Database, ingest: Ingest) -> None:
    database.full = True
    database.backend.has_room = lambda: False  # type: ignore[method-assign]
    with pytest.raises(StorageFull):
        asyncio.run(ingest.accept([piece(1)]))
    assert ingest.waiting == 0
    del database.backend.has_room
    assert asyncio.run(ingest.accept([piece(1)]))[0].stored == 2


def test_readers_behind_the_ack_get_what_was_stored_only(ingest: Ingest) -> None:
    seen: list[Stored] = []
    ingest.on_commit.append(seen.extend)

    def breaks(stored: list[Stored]) -> None:
        raise RuntimeError("a reader with a bug")

    ingest.on_commit.append(breaks)
    odd = frame(2, rows({"loss": [1.0], "": [2.0]}, [9]))
    receipts = asyncio.run(ingest.accept([piece(1), piece(1), odd]))
    assert [(receipt.stored, receipt.duplicate) for receipt in receipts] == [(2, 0), (0, 2), (1, 0)]
    assert [(item.seq, list(item.groups[0].values)) for item in seen] == [(1, ["loss"]), (2, ["loss"])]
    assert [item.id for item in seen] == [receipt.tail_id for receipt in receipts if receipt.tail_id is not None]
    assert ingest.counters["rejected_samples"] == 1
