"""One timer for all that must not take too long."""

from __future__ import annotations

import asyncio

from perfagent_server.deadlines import Deadlines


def test_what_is_past_its_time_is_ended_once() -> None:
    ended: list[str] = []

    async def live() -> None:
        deadlines, now = Deadlines(), asyncio.get_running_loop().time()
        over = asyncio.Event()
        deadlines.set("late", now, lambda: ended.append("late"))
        deadlines.set("done", now, lambda: ended.append("done"))
        deadlines.set("moved", now, lambda: ended.append("too early"))
        deadlines.set("moved", now + 0.3, lambda: (ended.append("moved"), over.set()))
        deadlines.set("far", now + 3600, lambda: ended.append("far"))
        deadlines.drop("done")
        async with asyncio.timeout(10):
            await over.wait()
        deadlines.drop("far")
        deadlines.drop("never set")

    asyncio.run(live())
    assert ended == ["late", "moved"]
