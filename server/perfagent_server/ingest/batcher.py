"""Answers the questions of many coroutines on another thread: all that wait with one call, so that a thousand askers do
not wake a thread each, nor wait for each other's lock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["Batcher"]

Question = TypeVar("Question")
Answer = TypeVar("Answer")


class Batcher(Generic[Question, Answer]):
    """answer: called with the questions that wait, in the order in which they came, on one thread at a time; gives for
    each its answer, or the exception to raise where it was asked."""

    def __init__(self, answer: Callable[[Sequence[Question]], Sequence[Answer | Exception]], *, most: int = 64) -> None:
        self._answer, self._most = answer, most
        self._lock = threading.Lock()  # of _waiting and _is_served
        self._waiting: list[tuple[Question, asyncio.Future[Answer]]] = []
        self._is_served = False

    async def ask(self, question: Question) -> Answer:
        """Raises what `answer` gave for this question, or raised itself."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()
        with self._lock:
            self._waiting.append((question, future))
            starts, self._is_served = not self._is_served, True
        if starts:
            loop.run_in_executor(None, self._serve)
        return await future

    def _serve(self) -> None:
        while True:
            with self._lock:
                taken, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
                if not taken:
                    self._is_served = False
                    return
            try:
                answers = self._answer([question for question, _ in taken])
            except Exception as error:  # noqa: BLE001 - whoever asked has to know
                answers = [error] * len(taken)
            by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Answer], Answer | Exception]]] = {}
            for (_, future), found in zip(taken, answers, strict=True):
                by_loop.setdefault(future.get_loop(), []).append((future, found))
            for loop, resolved in by_loop.items():
                _resolve_in(loop, resolved)


def _resolve_in(
    loop: asyncio.AbstractEventLoop, resolved: Sequence[tuple[asyncio.Future[Answer], Answer | Exception]]
) -> None:
    def resolve() -> None:
        for future, found in resolved:
            if future.done():  # whoever asked has left
                continue
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

    try:
        loop.call_soon_threadsafe(resolve)
    except RuntimeError:  # the loop is closed: nobody waits any more
        return
