"""Whose frames the next transaction stores: each run has its turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import until
from data_folder import place_of
from frames import frame, rows

from perfagent_server.database import Database, QueueFull, open_database
from perfagent_server.ingest.fair_queue import MAX_BYTES_OF_RUN, MAX_FRAMES, MAX_FRAMES_OF_RUN, FairQueue
from perfagent_server.ingest.group_commit import Ingest
from perfagent_server.store.sql import SqlStore


@dataclass(frozen=True)
class Item:
    run: str
    number: int
    count: int = 1
    size: int = 100


def queue_of(*items: Item) -> FairQueue[Item]:
    queue: FairQueue[Item] = FairQueue()
    for item in items:
        queue.put(item)
    return queue


def test_runs_take_turns_and_each_keeps_its_order() -> None:
    queue = queue_of(*(Item("noisy", number) for number in range(3)), Item("a", 0), Item("b", 0), Item("a", 1))
    assert [(item.run, item.number) for item in queue.take_batch()] == [
        ("noisy", 0), ("a", 0), ("b", 0), ("noisy", 1), ("a", 1), ("noisy", 2),
    ]  # fmt: skip
    assert not queue
    assert (queue.frames, queue.size) == (0, 0)


def test_a_backlog_fills_its_share_of_a_transaction_and_no_more() -> None:
    queue = queue_of(*(Item("noisy", number) for number in range(1000)), Item("late", 0))
    taken = queue.take_batch()
    assert sum(item.run == "noisy" for item in taken) == MAX_FRAMES_OF_RUN
    assert Item("late", 0) in taken
    assert queue.held("noisy") == (1000 - MAX_FRAMES_OF_RUN, 100 * (1000 - MAX_FRAMES_OF_RUN))


def test_the_share_is_of_bytes_too_and_one_large_frame_always_goes() -> None:
    large = MAX_BYTES_OF_RUN // 3
    queue = queue_of(*(Item("noisy", number, size=large) for number in range(10)))
    assert len(queue.take_batch()) == 3
    assert len(queue_of(Item("huge", 0, size=10 * MAX_BYTES_OF_RUN)).take_batch()) == 1


def test_who_had_no_turn_in_a_full_transaction_is_first_in_the_next() -> None:
    runs = [f"r{number}" for number in range(MAX_FRAMES + 10)]
    queue = queue_of(*(Item(run, number) for run in runs for number in range(2)))
    assert [item.run for item in queue.take_batch()] == runs[:MAX_FRAMES]
    assert [item.run for item in queue.take_batch()][:10] == runs[MAX_FRAMES:]


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(SimpleNamespace(**place_of(tmp_path)), reserve_bytes=1 << 12)
    yield opened
    opened.close()


def piece(seq: int, run: str):
    return frame(seq, rows({"loss": [1.0]}, [seq]), run=run)


@pytest.mark.fault
def test_s06_a_frame_is_stored_before_the_backlog_that_came_first(database: Database) -> None:
    """The mechanism; benchmarks/ingest/noisy.py measures what it does for others."""
    ingest, commits = Ingest(SqlStore(database)), []
    ingest.on_commit.append(lambda stored: commits.append([item.run for item in stored]))
    gate = threading.Event()
    database.submit(lambda _connection: gate.wait(10))
    until(lambda: database.waiting == 0)

    async def send() -> None:
        backlog = [asyncio.create_task(ingest.accept([piece(seq, "noisy")])) for seq in range(1, 601)]
        await asyncio.sleep(0)
        other = asyncio.create_task(ingest.accept([piece(1, "quiet")]))
        await asyncio.sleep(0)
        gate.set()
        assert [receipt.stored for receipt in await other] == [1]
        assert [receipt.stored for receipts in await asyncio.gather(*backlog) for receipt in receipts] == [1] * 600

    asyncio.run(send())
    assert "quiet" in commits[0]
    assert len(commits[0]) == MAX_FRAMES_OF_RUN + 1
    assert sum(map(len, commits)) == 601


def test_a_run_may_fill_a_quarter_of_what_may_wait(database: Database) -> None:
    ingest = Ingest(SqlStore(database), max_waiting=8)
    gate = threading.Event()
    database.submit(lambda _connection: gate.wait(10))
    until(lambda: database.waiting == 0)

    async def send() -> None:
        tasks = [asyncio.create_task(ingest.accept([piece(seq, "noisy")])) for seq in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 frames of run 'noisy' wait already, 2 are allowed"):
            await ingest.accept([piece(3, "noisy")])
        other = asyncio.create_task(ingest.accept([piece(1, "quiet")]))
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*tasks, other)

    asyncio.run(send())
    assert ingest.counters["refused_frames"] == 1
