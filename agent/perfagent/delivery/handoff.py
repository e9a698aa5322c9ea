"""The two threads of the agent, and the deque by which the training thread hands them what it measured.

    training thread          perfagent-sender (every 150 ms)                      perfagent-courier
    rows.append(row)  ──►    poll sources, drain and pack rows,            ──►    one HTTP request at a time,
    event(...)               spool (CRC), cut a frame every 1 or 3 s       ◄──    its answer; NVML between requests

Between threads there are deques and Events only, never queue.Queue or a lock that the training thread could meet: a
fork while such a lock is held hangs the child for good (20 of 20 tries), and a signal handler that logs deadlocks on
it. A forked child is inert: its `disabled` is True, its files and its socket are let go without a word, and nothing is
started in it.

The sender thread owns the spool and all decisions; the courier only carries. So a server that is stopped, slow or far
away delays nothing but delivery: what was measured is in the spool within 200 ms in any case.

Order of trust: a frame is written down before it is sent, sent until the server answers with our own reply, and only
then forgotten (spool.py). Nothing is given up by time; what had to be dropped for space is in `counters`.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perfagent.boundary.agent_log import logger
from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.wakeup import Bell, start_deaf
from perfagent.device import immortal, waiting

if TYPE_CHECKING:
    from perfagent.agent_config import AgentConfig
    from perfagent.delivery.columns import AnyRow
    from perfagent.delivery.send_loop import SendLoop
    from perfagent.delivery.spool import Spool
    from perfagent.delivery.transport import Transport
    from perfagent.identity import Identity
    from perfagent.step.state import StepState
    from perfagent.wire import Group

__all__ = ["Deferred", "Handoff", "Mirror", "Source"]

MAX_ROWS = 50_000
MAX_EVENTS = 10_000
AGAIN_S = 1.0


class Deferred(Protocol):
    """A row whose values are still on the device."""

    def ready(self) -> bool:
        """Whether the values have arrived; never blocks."""

    def row(self) -> AnyRow:
        """The row, once it is ready."""


class Mirror(Protocol):
    """Where what is recorded is written as well. Both raise OSError where that cannot be."""

    def take(self, groups: Iterable[Group], begins: deque[int]) -> None:
        """Samples that were recorded. begins: steps with which epochs began; whoever uses them takes them out."""

    def close(self) -> None:
        """There will be no more."""


class Happened(NamedTuple):
    """An event as it was handed in; it becomes a wire event on the sender thread.

    number: counted from 1, so that those are noticed which had to make room for others.
    """

    number: int
    kind: str
    time: float
    step: int | None
    monotonic: float
    data: dict[str, Any]


@dataclass(slots=True)
class _Flush:
    until: float
    done: threading.Event
    drained: bool = False
    delivered: bool = False


class Handoff:
    """Delivers the samples and events of one process.

    rows: the training thread appends and does nothing else. A row is `(step, Unix time, monotonic, names, values)` with
    one tuple object of names per shape, or `(step, Unix time, monotonic, metrics)` with what a user logged (a dict that
    nobody changes afterwards; its values are checked here; its time is 0.0 where the monotonic clock has to do), or a
    `Deferred`. counters: rows, samples, dropped, spooled, sent, acked, rejected, failed, ... all since the start.
    on_command: called on the sender thread with each command of a reply.
    """

    def __init__(
        self,
        config: AgentConfig,
        identity: Identity,
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause_s: Callable[[int], float] | None = None,
    ) -> None:
        """clock: that both threads go by. pause_s: seconds until the next try after so many failures in a row."""
        self.config, self.identity = config, identity
        self.clock, self.pause_s = clock, pause_s
        self.rows: deque[AnyRow | Deferred] = deque(maxlen=MAX_ROWS)
        self.counters: dict[str, int] = Counter()
        self.on_command: list[Callable[[Mapping[str, Any]], None]] = []
        self.progress: StepState | None = None
        """Whose steps are among the rows; the session puts its own here."""
        self.disabled = config.disabled
        self.cpu_s = 0.0
        """CPU seconds that both threads have used so far (for the governor)."""
        self.asked_cpu_s = 0.0
        """CPU seconds of work that the script asked for, which the governor need not make up for."""
        self.reader = StepReader()
        """Reads what was noted of steps; the session puts its own here."""
        self.logged = (0, 0, 0, 0)
        """log() calls so far, and their values; those right behind another one, and theirs (for the governor)."""
        self.stepped = (0, 0)
        """Plain steps so far, and the entries of their traces (for the governor)."""
        self.mirror: Mirror | None = None
        """Where rank 0 writes what it records as well; the session puts one here if that is wanted."""
        self.newest_loss: tuple[int, float] | None = None
        """Step and value of the last loss that was read: for whoever shows the run."""
        self.events: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self._numbers = itertools.count(1)  # any thread may hand in an event, and takes its number in one call
        self.sources: list[Source] = []
        self.sources_due = 0.0
        """On the monotonic clock: none of the sources has anything to do before. Whoever makes one due earlier says so
        here."""
        self.slow_sources: list[Source] = []
        self.imports: list[str] = []
        """Modules that sources need: imported by `start`, since a fork or Ctrl-C must not meet an import of ours
        later."""
        self.flushes: deque[_Flush] = deque()
        self._transport = transport
        self._send_loop: SendLoop | None = None
        self._making = threading.Lock()  # never taken by the training thread's hooks, nor in a forked child
        self.wake, self.closed = Bell(), threading.Event()
        self.closing_at: float | None = None
        self.final = ""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self.told: set[str] = set()
        self.folder = config.sources / identity.source
        self.followed: Path | None = None
        """Where the next run of this process has its source, once this one ends for it."""
        self.settled = threading.Event()
        """Set when the sender thread has opened its files."""
        # register_at_fork cannot be undone, so it must not keep us alive
        forget = weakref.WeakMethod(self._in_forked_child)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    @property
    def disabled(self) -> bool:
        """Whether nothing is taken any more. The training thread reads its own copy, which lies beside all else that it
        needs."""
        return self._disabled

    @disabled.setter
    def disabled(self, off: bool) -> None:
        self._disabled = off
        if self.progress is not None:
            self.progress.off = off

    # ---- called by the session, on any thread

    def start(self) -> None:
        """Starts the sender thread, once. Does nothing in a forked child or when disabled; never raises."""
        if self.disabled or self._thread is not None or os.getpid() != self._pid or not self._import():
            return
        thread = threading.Thread(target=self._run, name="perfagent-sender", daemon=True)
        try:
            start_deaf(thread)
        # no thread to be had: at interpreter shutdown, or at the limit of the user's processes
        except RuntimeError as error:
            self._disable(f"its thread could not be started ({error})")
            return
        self._thread = thread

    def _import(self) -> bool:
        """Imports all that the threads need, on the calling thread: 20 ms. On the sender's thread the same 20 ms would
        fall beside the first steps (half of what a run of eighty steps cost in the background), and a fork in the
        middle of an import would leave the module locked in the child."""
        for name in self.imports:
            with contextlib.suppress(Exception):  # NVML's bindings are somebody else's
                importlib.import_module(name)
        try:
            importlib.import_module("perfagent.delivery.send_loop")
        except Exception as error:  # noqa: BLE001 - a broken installation is no reason why a training should not start
            self._disable(f"it could not be imported ({error})")
            return False
        return True

    def event(self, kind: str, data: dict[str, Any], *, step: int | None = None) -> None:
        """Something that happened once; redacted and made encodable on the sender thread. kind: one of
        wire.EVENT_KINDS."""
        if not self.disabled:
            self.events.append(Happened(next(self._numbers), kind, time.time(), step, time.monotonic(), data))

    def add_source(self, poll: Callable[[], None], *, every_s: float = 0.0) -> Source:
        """`poll` is called on the sender thread before draining: on every tick, or on one every so often. It must not
        block."""
        source = Source(poll, every_s)
        self.sources.append(source)
        self.sources_due = 0.0
        return source

    def add_slow_source(self, poll: Callable[[], bool | None], *, every_s: float = 0.5) -> None:
        """`poll` is called on the courier thread between and during requests, and may block for a moment. Once it has
        answered False there is nothing to be had from it, and it is not called again."""
        self.slow_sources.append(Source(poll, every_s))

    def flush(self, timeout_s: float) -> bool:
        """Asks for delivery of all that was handed in before; True when the server has acknowledged it within the
        time."""
        if self.disabled or self._thread is None or not self._thread.is_alive():
            return False
        request = _Flush(self.clock() + timeout_s, threading.Event())
        self.flushes.append(request)
        self.wake.ring()
        request.done.wait(timeout_s)
        return request.delivered

    def close(self, state: str, reason: str = "", timeout_s: float = 1.5, **more: Any) -> None:
        """The last event, everything into the spool, one bounded attempt to deliver. Returns within timeout_s.

        Called again, after an interrupt, it waits for what is left of that time.
        """
        if self.disabled:
            return
        if self.closing_at is None:
            self.final = state
            if state:
                self.event("state", {"state": state, **({"reason": reason} if reason else {}), **more})
            self.closing_at = self.clock() + timeout_s
            self.wake.ring()
        if self._thread is not None and self._thread is not threading.current_thread():
            self.closed.wait(max(0.0, self.closing_at - self.clock()))
        self.disabled = True

    @property
    def spool(self) -> Spool:
        """What was measured and is not acknowledged yet."""
        return self.send_loop.spool

    def tell(self, topic: str, level: int, message: str) -> None:
        """Logs a message, once a topic."""
        if topic not in self.told:
            self.told.add(topic)
            logger.log(level, message)

    # ---- forking

    def _in_forked_child(self) -> None:
        """No lock, no logging, no thread: other threads may have held any lock at the moment of the fork."""
        self.disabled = True
        if waiting() or (self.progress is not None and self.progress.clock is not None):
            immortal(self, [*self.rows], [*self.sources])
        self.rows.clear()
        self.events.clear()
        self.sources.clear()
        self.slow_sources.clear()
        if self._send_loop is not None:
            self._send_loop.forked()

    # ---- the sender thread

    @property
    def send_loop(self) -> SendLoop:
        """What the sender's thread does. A test may drive it instead of `start`, by the clock that it gave."""
        with self._making:
            if self._send_loop is None:
                # not with this module: `import perfagent` is to be quick
                from perfagent.delivery.send_loop import SendLoop

                self._send_loop = SendLoop(self, self._transport)
            return self._send_loop

    def _run(self) -> None:
        """The one place where this thread's own errors end: counted, logged once, begun again once, then the agent is
        off."""
        for attempt in (1, 2):
            try:
                self.send_loop.run()
                break
            except BaseException as error:  # noqa: BLE001 - the training must go on whatever is wrong with us, SystemExit included
                self.counters["errors"] += 1
                if attempt == 2:
                    self._disable(f"{type(error).__name__}: {error}")
                else:
                    self.tell(
                        "error",
                        logging.WARNING,
                        f"perfagent: internal error, starting over: {type(error).__name__}: {error}",
                    )
                    if self.closing_at is None:  # what was missing (memory, a file descriptor) may be back in a moment
                        self.wake.wait(AGAIN_S if self.pause_s is None else self.pause_s(1))
        self.closed.set()

    def _disable(self, why: str) -> None:
        self.disabled = True
        self.rows.clear()
        self.tell(
            "disabled",
            logging.WARNING,
            f"perfagent: switched off for this process: {why}; training goes on unmonitored",
        )


class Source:
    """A callable that is polled; off after three errors in a row, or when it says that it has nothing to tell.

    due: on the monotonic clock, when it is to be polled next. Whoever is polled may put it off.
    """

    def __init__(self, poll: Callable[[], bool | None], every_s: float = 0.0) -> None:
        self._poll, self._every_s = poll, every_s
        self.due = 0.0
        self.errors = 0
        self.error = ""
        self.name = getattr(poll, "__qualname__", type(poll).__name__)

    def poll_if_due(self, now: float) -> bool:
        """False when it is off; now: time.monotonic()."""
        if now < self.due:
            return True
        self.due = now + self._every_s
        return self.poll()

    def poll(self) -> bool:
        """False when it is off."""
        try:
            found = self._poll()
        except BaseException as error:  # noqa: BLE001 - a sampler's trouble must not stop delivery
            self.errors += 1
            self.error = f"{type(error).__name__}: {error}"
            return self.errors < 3
        self.errors = 0
        return found is not False
