"""Questions of coroutines that one thread answers, all that wait with one call."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from perfagent_server.ingest.batcher import Batcher


def test_all_that_wait_are_answered_with_one_call_in_order() -> None:
    """Who leaves meanwhile disturbs nobody."""
    gate, calls = threading.Event(), []

    def answer(questions: Sequence[int]) -> list[int]:
        calls.append(list(questions))
        gate.wait(10)
        return [10 * question for question in questions]

    async def ask() -> list[int]:
        batcher: Batcher[int, int] = Batcher(answer, most=50)
        first = asyncio.create_task(batcher.ask(0))
        while not calls:
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(batcher.ask(number)) for number in range(1, 61)]
        await asyncio.sleep(0)
        rest.pop(6).cancel()
        gate.set()
        return [await task for task in (first, *rest)]

    assert asyncio.run(ask()) == [10 * number for number in range(61) if number != 7]
    assert [len(call) for call in calls] == [1, 50, 10]
