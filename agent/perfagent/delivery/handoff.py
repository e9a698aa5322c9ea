"""What the threads of the agent hand one another, and what any thread may ask of them.

    training thread          perfagent-sender (every 150 ms)                      perfagent-courier
    rows.append(row)  ──►    poll sources, drain and pack rows,            ──►    one HTTP request at a time,
    event(...)               spool (CRC), cut a frame every 1 or 3 s       ◄──    its answer; NVML between requests

Between threads there are deques and Events only, never queue.Queue or a lock that the training thread could meet: a
fork while such a lock is held hangs the child for good (20 of 20 tries), and a signal handler that logs deadlocks on
it.

The sender thread (sender.py, send_loop.py) owns the spool and all decisions; the courier only carries. So a server that
is stopped, slow or far away delays nothing but delivery: what was measured is in the spool within 200 ms in any case.

Order of trust: a frame is written down before it is sent, sent until the server answers with our own reply, and only
then forgotten (spool.py). Nothing is given up by time; what had to be dropped for space is in `counters`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from perfagent.boundary.guard import logger
from perfagent.decode.step_decoder import StepReader
from perfagent.delivery.wakeup import Bell

if TYPE_CHECKING:
    from perfagent.agent_config import AgentConfig
    from perfagent.delivery.columns import AnyRow
    from perfagent.delivery.row_packing import Packed
    from perfagent.identity import Identity
    from perfagent.step.state import StepState
    from perfagent.wire import Group

__all__ = ["MAX_EVENTS", "MAX_ROWS", "Deferred", "Flush", "Handoff", "Happened", "Mirror", "Source"]

MAX_ROWS = 50_000
MAX_EVENTS = 10_000


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
    """An event as it was handed in."""

    kind: str
    time: float
    step: int | None
    monotonic: float
    data: dict[str, Any] | Callable[[], dict[str, Any]]


@dataclass(slots=True)
class Flush:
    """A thread that waits for delivery. drained: what it asks for was taken out of the deques."""

    until: float
    done: threading.Event = field(default_factory=threading.Event)
    drained: bool = False
    delivered: bool = False


class Source:
    """A callable that is polled; off after three errors in a row, or once it returns False.

    due: on the monotonic clock, when it is to be polled next. Whoever is polled may put it off.
    """

    def __init__(self, poll: Callable[[], bool | None], every_s: float = 0.0) -> None:
        self._poll, self._every_s = poll, every_s
        self.due = 0.0
        self.errors = 0
        self.error = ""
        self.name = getattr(poll, "__qualname__", type(poll).__name__)

    def poll(self, now: float) -> bool:
        """False when it is off. now: time.monotonic()."""
        self.due = now + self._every_s
        try:
            found = self._poll()
        except BaseException as error:  # noqa: BLE001 - a sampler's trouble must not stop delivery
            self.errors += 1
            self.error = f"{type(error).__name__}: {error}"
            return self.errors < 3
        self.errors = 0
        return found is not False


class Handoff:
    """The samples and events of one process, on their way to the sender thread.

    rows: the training thread appends and does nothing else. A row is `(step, Unix time, monotonic, names, values)`, or
    `(step, Unix time, monotonic, metrics)` with what a user logged (a dict that nobody changes afterwards; its values are
    checked here; its time is 0.0 where the monotonic clock has to do), or a `Deferred`. counters: samples, dropped,
    spooled, sent, acked, rejected, failed, ... all since the start. on_command: called on the sender thread with each
    command of a reply.
    """

    def __init__(self, config: AgentConfig, identity: Identity, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: that all threads go by."""
        self.config, self.identity, self.clock = config, identity, clock
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
        self.logged = [0, 0, 0, 0]
        """log() calls so far, and their values; those right behind another one, and theirs (for the governor)."""
        self.mirror: Mirror | None = None
        """Where rank 0 writes what it records as well; the session puts one here if that is wanted."""
        self.with_loss: list[Packed] = []
        """The newest rows with a loss."""
        self.events: deque[Happened] = deque(maxlen=MAX_EVENTS)
        self.sources: list[Source] = []
        self.sources_due = 0.0
        """On the monotonic clock, when a source has something to do. Whoever makes one due earlier says so here."""
        self.slow_sources: list[Source] = []
        self.imports: list[str] = []
        """Modules that sources need, imported at the start: a fork or Ctrl-C must not meet an import of ours later."""
        self.flushes: deque[Flush] = deque()
        self.wake = Bell()
        self.closing_at: float | None = None
        self.final = ""
        self.said_topics: set[str] = set()
        self.folder = config.sources / identity.source
        self.followed: Path | None = None
        """Where the next run of this process has its source, once this one ends for it."""
        self.settled = threading.Event()
        """Set when the sender thread has opened its files."""

    @property
    def disabled(self) -> bool:
        """Whether nothing is taken any more. The training thread reads its own copy, beside what else it needs."""
        return self._disabled

    @disabled.setter
    def disabled(self, off: bool) -> None:
        self._disabled = off
        if self.progress is not None:
            self.progress.off = off

    @property
    def newest_loss(self) -> tuple[int, float] | None:
        """Step and value of the last loss that was read: for whoever shows the run."""
        from perfagent.delivery.row_packing import last_row

        rows = [
            last_row(block) for block in self.with_loss
        ]  # those with other names besides stand in blocks of their own
        step, *_, values = max(rows, key=itemgetter(2), default=(0, 0.0, 0.0, {}))
        return (step, values["loss"]) if values else None

    def event(self, kind: str, data: dict[str, Any] | Callable[[], dict[str, Any]], *, step: int | None = None) -> None:
        """Something that happened once, of one of wire.EVENT_KINDS; redacted and encoded on the sender thread, which also
        calls a function that gives the data."""
        if not self.disabled:
            if len(self.events) == MAX_EVENTS:  # the oldest makes room
                self.counters["event_overflows"] += 1
            self.events.append(Happened(kind, time.time(), step, time.monotonic(), data))

    def add_source(self, poll: Callable[[], None], *, every_s: float = 0.0) -> Source:
        """`poll` is called on the sender thread before draining, every so often or each tick. It must not block."""
        source = Source(poll, every_s)
        self.sources.append(source)
        self.sources_due = 0.0
        return source

    def add_slow_source(self, poll: Callable[[], bool | None], *, every_s: float = 0.5) -> None:
        """`poll` is called on the courier thread, also during requests, and may block for a moment. False: never again."""
        self.slow_sources.append(Source(poll, every_s))

    def tell(self, topic: str, level: int, message: str) -> None:
        """Logs a message, once a topic."""
        if topic not in self.said_topics:
            self.said_topics.add(topic)
            logger.log(level, message)
