from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from builders import until
from data_folder import place_of
from frames import frame, rows

from perfagent_server.database import Database, QueueFull, StorageFull, open_database
from perfagent_server.ingest.group_commit import Ingest
from perfagent_server.store.sql import SqlStore
from perfagent_server.store.stored import Stored


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = open_database(SimpleNamespace(**place_of(tmp_path)), reserve_bytes=1 << 12)
    yield opened
    opened.close()


@pytest.fixture
def ingest(database: Database) -> Ingest:
    return Ingest(SqlStore(database))


def piece(seq: int, rank: int = 0, run: str = "r1"):
    return frame(seq, rows({"loss": [1.0, 2.0]}, [2 * seq, 2 * seq + 1]), rank=rank, run=run)


def test_those_who_send_at_the_same_time_share_a_commit(database: Database, ingest: Ingest) -> None:
    gate = threading.Event()
    blocker = database.submit(lambda connection: gate.wait(10))
    until(lambda: database.waiting == 0)

    async def send() -> list[int]:
        tasks = [asyncio.create_task(ingest.accept([piece(1, rank)])) for rank in range(20)]
        await asyncio.sleep(0)
        gate.set()
        return [receipt.stored for task in tasks for receipt in await task]

    assert asyncio.run(send()) == [2] * 20
    blocker.result(10)
    assert ingest.counters["commits"] == 1
    assert ingest.counters["samples"] == 40


def test_readers_behind_the_ack_get_what_was_stored_and_only_that(ingest: Ingest) -> None:
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


@pytest.mark.fault
def test_s05_too_many_waiting_frames_are_refused_at_once(database: Database) -> None:
    ingest = Ingest(SqlStore(database), max_waiting=3)
    gate = threading.Event()
    blocker = database.submit(lambda connection: gate.wait(10))
    until(lambda: database.waiting == 0)

    async def send() -> None:
        tasks = [asyncio.create_task(ingest.accept([piece(1, run=f"r{number}")])) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="3 frames wait already, 3 are allowed"):
            await ingest.accept([piece(4)])
        gate.set()
        await asyncio.gather(*tasks)
        assert (await ingest.accept([piece(4)]))[0].stored == 2

    asyncio.run(send())
    blocker.result(10)
    assert ingest.waiting == 0


@pytest.mark.fault
def test_s05_a_refusal_of_the_database_reaches_every_sender_and_the_next_one_is_served(
    database: Database, ingest: Ingest
) -> None:
    database.full = True
    database.backend.has_room = lambda: False  # type: ignore[method-assign]
    with pytest.raises(StorageFull):
        asyncio.run(ingest.accept([piece(1)]))
    assert ingest.waiting == 0
    del database.backend.has_room
    assert asyncio.run(ingest.accept([piece(1)]))[0].stored == 2


def test_a_sender_that_left_does_not_disturb_the_others(ingest: Ingest, database: Database) -> None:
    gate = threading.Event()
    blocker = database.submit(lambda connection: gate.wait(10))
    until(lambda: database.waiting == 0)

    async def send() -> None:
        gone, stays = asyncio.create_task(ingest.accept([piece(1)])), asyncio.create_task(ingest.accept([piece(2)]))
        await asyncio.sleep(0)
        gone.cancel()
        gate.set()
        assert (await stays)[0].stored == 2

    asyncio.run(send())
    blocker.result(10)
    assert ingest.accept_and_wait([piece(1)])[0].duplicate == 2  # stored all the same


def test_frames_sent_from_many_threads_are_all_stored_once(ingest: Ingest) -> None:
    def send(rank: int) -> None:
        for seq in range(1, 21):
            ingest.accept_and_wait([piece(seq, rank)])
            if seq % 5 == 0:
                ingest.accept_and_wait([piece(seq, rank)])

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ingest.counters["samples"], ingest.counters["duplicate_samples"]) == (8 * 20 * 2, 8 * 4 * 2)
