"""The thread that waits for the network, so that no one else has to: one request at a time, and NVML between requests.

If a call never returns (a lost GPU's driver), the thread is left where it is and replaced; see exchange.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from perfagent.delivery.transport import Answer, judge
from perfagent.delivery.wakeup import Bell
from perfagent.errors import ServerUnreachable

if TYPE_CHECKING:
    from perfagent.delivery.handoff import Source
    from perfagent.delivery.spool import Outgoing, Spool
    from perfagent.delivery.transport import Transport

__all__ = ["Courier", "Job"]

SOURCE_STUCK_S = 2.0
"""Most seconds that a sampler may take: NVML answers in microseconds or, when a GPU fell off the bus, never."""


class Job(msgspec.Struct):
    """One request for the courier. spool is None for a sign of life, which nobody repeats."""

    body: bytes
    encoding: str | None
    outgoing: Outgoing
    spool: Spool | None


class Courier:
    """Carries one job at a time; answers come back through a deque.

    ended: it is to end, or was replaced. gone: its thread could not start, or died; why. source: is being polled.
    """

    def __init__(
        self, transport: Transport, slow_sources: list[Source], wake: Bell, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._transport, self._slow_sources, self._wake, self._clock = transport, slow_sources, wake, clock
        self.work = Bell()
        self.answers: deque[tuple[Job, Answer]] = deque()
        self.ended = self.gone = False
        self.why = ""
        self.cpu_s = 0.0
        self.source: Source | None = None
        self._job: Job | None = None
        self._errand: Callable[[], None] | None = None
        self._source_since = 0.0
        """When the source was asked that is being asked."""
        if hasattr(transport, "idle"):
            transport.idle = self._sample
        try:
            threading.Thread(target=self._run, name="perfagent-courier", daemon=True).start()
        except RuntimeError as error:  # at interpreter shutdown, or at the limit of the user's processes
            self.gone, self.why = True, str(error)

    @property
    def loopback(self) -> bool:
        return bool(getattr(self._transport, "loopback", True))

    def carry(self, job: Job) -> None:
        self._job = job
        self.work.ring()

    def run(self, errand: Callable[[], None]) -> None:
        """Has something else done that may take a while, between two requests."""
        self._errand = errand
        self.work.ring()

    def stuck(self, now: float) -> bool:
        """Whether a source does not come back. (A request does: a look-up of its server's name within 30 s, the rest in
        ten.)"""
        return 0.0 < self._source_since < now - SOURCE_STUCK_S

    def _run(self) -> None:
        try:
            while not self.ended:
                due = min((source.due for source in [*self._slow_sources]), default=None)
                self.work.wait(None if due is None else due - self._clock())
                self._carry_on()
            self._transport.close()
        except BaseException as error:  # noqa: BLE001 - this thread's errors end here: another one takes its place
            self.why = f"{type(error).__name__}: {error}"
        self.gone = not self.ended
        self._wake.ring()

    def _carry_on(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            try:
                answer = judge(self._transport.post(job.body, encoding=job.encoding))
            except ServerUnreachable as error:
                answer = Answer(kind="retry", reason=str(error))
            except Exception as error:  # noqa: BLE001 - a transport's own error must not end the thread that carries
                answer = Answer(kind="retry", reason=f"{type(error).__name__}: {error}")
            self.answers.append((job, answer))
            self._wake.ring()
        errand, self._errand = self._errand, None
        if errand is not None:
            with contextlib.suppress(Exception):  # what cannot be done is left
                errand()
            self._wake.ring()
        self._sample()
        self.cpu_s = time.thread_time()

    def _sample(self) -> None:
        for source in [*self._slow_sources]:
            now = self._clock()
            if not self.ended and now >= source.due:
                self._poll(source, now)

    def _poll(self, source: Source, now: float) -> None:
        self._source_since, self.source = now, source
        works = source.poll(now)
        if works and self.ended:  # it took too long: from now on it is our successor's
            self._slow_sources.append(source)
            return
        if not works and source in self._slow_sources:
            self._slow_sources.remove(source)
        self._source_since, self.source = 0.0, None
