"""Moves what a process has said to an earlier run, once its training continues that one (loop.resume).

The server knows a source as one run's for ever. So the process goes on as a new source, to which everything is given
again that the old one has sent; the old one says where it went, and the server forgets a run that all of its sources
have left. Possible before the first step only: until then there is little, and it is kept here.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from perfagent.wire import Event

if TYPE_CHECKING:
    from perfagent.delivery.spool import Outgoing, Spool

__all__ = ["Moves"]

MOST_BYTES = 8 * 2**20
"""Hours of a process that trains nothing. Who has said more leaves a run behind that holds it."""


class Moves:
    """left: the spool of the source that was left, until its last word is delivered. run: as whose source the server knows
    this one; None: of no run yet."""

    def __init__(self, run: str | None) -> None:
        self.left: Spool | None = None
        self.run = run
        self._said: list[Outgoing] = []
        self._size = 0

    def keep(self, outgoing: Outgoing, run: str | None, size: int, *, begun: bool) -> None:
        """A frame goes out under this run. begun: the first step is over, so that nothing moves any more."""
        self.run = run
        self._size += size
        if begun or self._size > MOST_BYTES:
            self._said.clear()
        # one without content is a sign of life; the newest may be sent again
        elif (outgoing.groups or outgoing.events) and outgoing not in self._said[-1:]:
            self._said.append(outgoing)

    def move(self, before: Spool, after: Spool) -> None:
        """Written down there before it goes here: killed in between, it is reported twice, in two runs."""
        while (waiting := before.next()) is not None:  # what is not delivered yet need not be
            if waiting not in self._said[-1:]:
                self._said.append(waiting)
            before.ack(waiting.seq)
        for frame in self._said:
            after.keep(frame.groups, frame.events)
        data: dict[str, object] = {
            "state": "finished",
            "reason": {"key": "continues_run", "run": after.header.run or ""},
        }
        if self._size <= MOST_BYTES:
            data["continues"] = after.header.run or ""
        now = time.monotonic()
        before.append((), [Event(kind="state", time=time.time(), monotonic=now, data=data)], now=now)
        self.left, self._said, self.run = before, [], None
