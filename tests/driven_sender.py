"""A sender whose thread is the test: time passes when the test says so, in ticks of an eighth of a second,
which sums up without a rounding."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recording_transport import RecordingTransport

from perfagent.agent_config import AgentConfig
from perfagent.delivery.sender import Sender
from perfagent.identity import Identity
from perfagent.wire import Frame

__all__ = ["Driven", "row", "steps_in"]

TICK_S = 0.125
NAMES = ("loss", "lr")


def row(step: int, loss: float = 0.5) -> tuple[Any, ...]:
    """A row of two samples, as a session hands it in."""
    return step, 1.7e9 + step, float(step), NAMES, (loss, 1e-3)


def steps_in(frames: Iterable[Frame], name: str = "loss") -> list[int]:
    return [step for frame in frames for group in frame.groups if name in group.values for step in group.steps()]


class Driven:
    """now: its clock. sent_at: when requests began, in seconds from the start. The pause after a failure is one second
    longer than after the one before."""

    def __init__(
        self, folder: Path, transport: Any = None, *, identity: Identity | None = None, **settings: Any
    ) -> None:
        self.now = self.start = 1000.0
        self.transport = transport if transport is not None else RecordingTransport()
        self.sender = Sender(
            AgentConfig(
                state_dir=folder / "state", **{"server": "http://127.0.0.1:9", "spool_tick_s": TICK_S, **settings}
            ),
            identity or Identity(project="p", run="r", attempt=1),
            transport=self.transport,
            clock=self._clock,
            pause_s=float,
        )
        self.counters = self.sender.counters
        self.sent_at: list[float] = []
        self.begun = self.ending = False

    def _clock(self) -> float:
        if self.ending:  # there it waits for what may never come
            self.now += 0.02
        return self.now

    def goes_on(self, seconds: float, rows: Iterable[Any] = (), *, waits: bool = True) -> Driven:
        """So much time passes, with a row a tick. waits: for the answer to each request."""
        given = iter(rows)
        if not self.begun:
            self.begun = True
            self.sender.send_loop.begin()
        for _ in range(round(seconds / TICK_S)):
            self.sender.rows.extend([one for one in (next(given, None),) if one is not None])
            self.turn(waits=waits)
            self.now += TICK_S
        return self

    def turn(self, *, waits: bool = True) -> None:
        """What is due now, and what its answers make due."""
        loop, sent = self.sender.send_loop, self.counters["sent_frames"]
        loop.step(rung=self.sender.wake.wait(0))
        if self.counters["sent_frames"] > sent:
            self.sent_at.append(self.now - self.start)
        end = time.monotonic() + 20.0
        while waits and loop.exchange.busy is not None:
            assert time.monotonic() < end, "no answer came"
            self.sender.wake.wait(1.0)
            loop.step(rung=True)

    def end(self) -> None:
        """The end of its process, with a server that answers."""
        self.ending = True
        self.sender.closing_at = self.now + 1.5
        self.sender.send_loop.step(rung=True)
        self.sender.disabled = True

    def told(self, name: str) -> list[float]:
        """All values of a series that were sent."""
        return [v for f in self.transport.frames for g in f.groups if name in g.values for v in g.column(name)]
