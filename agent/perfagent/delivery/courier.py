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

STUCK_S = 60.0
"""A request ends by itself ten seconds after its server's name was looked up. The look-up takes 30 s where three
nameservers are away. (With a limit of 25 s, each try left a thread behind and no message.)"""
SOURCE_STUCK_S = 2.0
"""What a sampler may take: NVML answers in microseconds or, when a GPU fell off the bus, never."""


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
        self._since = self._source_since = self._errand_since = 0.0
        """When what it does began: a request, from when it was handed over, and what a source is asked meanwhile."""
        if hasattr(transport, "idle"):
            transport.idle = self._sample
        self._thread = threading.Thread(target=self._run, name="perfagent-courier", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # at interpreter shutdown, or at the limit of the user's processes
            self.gone, self.why = True, str(error)

    @property
    def loopback(self) -> bool:
        return bool(getattr(self._transport, "loopback", True))

    def carry(self, job: Job) -> None:
        self._since = self._clock()
        self._job = job
        self.work.ring()

    def run(self, errand: Callable[[], None]) -> None:
        """Has something else done that may take a while, between two requests."""
        self._errand = errand
        self.work.ring()

    def stuck(self, now: float) -> bool:
        """Whether something does not come back: a source, an errand or a request."""
        if 0.0 < self._source_since < now - SOURCE_STUCK_S:
            return True
        return 0.0 < self._errand_since < now - STUCK_S or self.given_up(now) is not None

    def given_up(self, now: float) -> Answer | None:
        """What stands for the answer to a request that does not come back, where it is the request that hangs."""
        if self.source is not None or self._errand_since or not 0.0 < self._since < now - STUCK_S:
            return None
        reason = f"no end of the request after {STUCK_S:.0f} s, as if its name were looked up in vain"
        return Answer(kind="retry", reason=reason)

    @property
    def runs(self) -> bool:
        """Whether its thread has not come to its end."""
        return self._thread.is_alive()

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
            self._since = 0.0
            self.answers.append((job, answer))
            self._wake.ring()
        errand, self._errand = self._errand, None
        if errand is not None:
            self._errand_since = self._clock()
            with contextlib.suppress(Exception):  # what cannot be done is left
                errand()
            self._errand_since = 0.0
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
