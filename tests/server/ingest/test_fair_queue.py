"""Whose frames the next transaction stores: each run has its turn."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent_server.ingest.fair_queue import MAX_BYTES_OF_RUN, MAX_FRAMES, MAX_FRAMES_OF_RUN, FairQueue


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


def many(count: int, run: str = "noisy", **more: int) -> list[Item]:
    return [Item(run, number, **more) for number in range(count)]


def test_runs_take_turns_and_each_keeps_its_order() -> None:
    queue = queue_of(*many(3), Item("a", 0), Item("b", 0), Item("a", 1))
    assert [(item.run, item.number) for item in queue.take_batch()] == [
        ("noisy", 0), ("a", 0), ("b", 0), ("noisy", 1), ("a", 1), ("noisy", 2),
    ]  # fmt: skip
    assert (bool(queue), queue.frames, queue.size) == (False, 0, 0)


def test_a_backlog_fills_its_share_of_a_transaction_only() -> None:
    queue = queue_of(*many(1000), Item("late", 0))
    taken = queue.take_batch()
    assert (len(taken), Item("late", 0) in taken) == (MAX_FRAMES_OF_RUN + 1, True)
    assert queue.held("noisy") == (1000 - MAX_FRAMES_OF_RUN, 100 * (1000 - MAX_FRAMES_OF_RUN))
    assert len(queue_of(*many(10, size=MAX_BYTES_OF_RUN // 3)).take_batch()) == 3, "of bytes, too"
    assert len(queue_of(Item("huge", 0, size=10 * MAX_BYTES_OF_RUN)).take_batch()) == 1, "one frame always goes"


def test_who_had_no_turn_is_first_in_the_next_transaction() -> None:
    runs = [f"r{number}" for number in range(MAX_FRAMES + 10)]
    queue = queue_of(*(Item(run, number) for run in runs for number in range(2)))
    assert [item.run for item in queue.take_batch()] == runs[:MAX_FRAMES]
    assert [item.run for item in queue.take_batch()][:10] == runs[MAX_FRAMES:]
