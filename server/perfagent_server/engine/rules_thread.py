"""The thread of the rules: one round after the other, and what can be said of how they go without any lock."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress

from perfagent_server.database import StorageError
from perfagent_server.database.errors import spell
from perfagent_server.engine.canary import Canary

__all__ = ["QUIET_S", "STUCK_S", "RulesThread"]

log = logging.getLogger("perfagent.server")

STUCK_S = 120.0
"""A thread that has not moved for so long is taken for one that never will: no wait for the database is as long."""
QUIET_S = 45.0
"""If the thread makes no progress for so long, the watchdog raises `rules_stopped`. A healthy round reports progress at each
frame, and waits for the database for 30 s at most."""
_MOST_FAILED_ROUNDS = 3
_IDLE_WAIT_S = 1.0
_GATHER_S = 0.05
"""From one round to the next, at least. Frames of many agents come one by one, and to judge those of so long together
costs half of judging each alone."""


class RulesThread(ABC):
    """start() and stop() it; wake() after each commit. canary: judged between two rounds, also while there are many."""

    def __init__(self, canary: Canary, monotonic: Callable[[], float]) -> None:
        self._monotonic, self.canary = monotonic, canary
        self._event = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._failed_rounds, self._round_error, self._is_database_away = 0, "", False
        self._moved_at = monotonic()

    @abstractmethod
    def _work(self) -> None:
        """One round after the other until there is nothing to do."""

    @abstractmethod
    def _note_failure(self, error: Exception) -> None:
        """A round failed, and will be tried again."""

    @abstractmethod
    def checkpoint(self) -> None:
        """The last word before the thread ends."""

    def start(self) -> None:
        self._moves()
        self.canary.start()
        self._thread = threading.Thread(target=self._run, name="perfagent-rules", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its round, with a checkpoint. What it has not judged, the next start judges."""
        self._stopping = True
        self._event.set()
        if self._thread is not None:
            self._thread.join(timeout=10)
            self._thread = None

    def wake(self) -> None:
        """There may be something new. Cheap; called on the writer thread after each commit."""
        self._event.set()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs; true for one that was not started, or is stopped on purpose."""
        return self._thread is None or self._thread.is_alive()

    @property
    def is_stuck(self) -> bool:
        """Whether the thread runs and does not move."""
        return self._thread is not None and self._monotonic() - self._moved_at > STUCK_S

    @property
    def can_judge(self) -> bool:
        return self.is_alive and not self.is_stuck

    def trouble(self) -> str:
        """Why the rules do not judge, as far as they know it themselves; empty while they do."""
        if not self.is_alive:
            return "the thread of the rules has ended"
        still = self._monotonic() - self._moved_at
        if self._thread is not None and still > QUIET_S:
            return f"the thread of the rules has not moved for {still:.0f} s"
        if self._failed_rounds >= _MOST_FAILED_ROUNDS:
            return f"the last {self._failed_rounds} rounds have failed ({self._round_error})"
        return self.canary.trouble() if self._thread is not None else ""

    @property
    def waits_for_database(self) -> bool:
        """Whether the last round failed for the database."""
        return self._failed_rounds > 0 and self._is_database_away

    def _moves(self) -> None:
        """The thread has begun something."""
        self._moved_at = self._monotonic()

    def _run(self) -> None:
        pause, judged_at = 0.0, -math.inf
        while not self._stopping:
            self._moves()
            self._event.wait(_IDLE_WAIT_S if pause == 0 else pause)
            if not self._stopping:
                time.sleep(max(0.0, judged_at + _GATHER_S - time.monotonic()))
            self._event.clear()
            try:
                self._work()
                pause, judged_at, self._failed_rounds = 0.0, time.monotonic(), 0
            except Exception as error:  # noqa: BLE001 - the rules must outlive a full disk and a frame nobody foresaw; it is counted and said
                pause = min(max(1.0, 2 * pause), 30.0)
                self._failed(error, pause)
        with suppress(StorageError):
            self.checkpoint()

    def _failed(self, error: Exception, pause: float) -> None:
        self._round_error, self._is_database_away = spell(error), isinstance(error, StorageError)
        self._failed_rounds += 1
        if isinstance(error, StorageError):
            log.warning("the rules wait %.0f s for the database: %s", pause, error)
        else:
            log.error("judging failed, tried again in %.0f s", pause, exc_info=error)
        self._note_failure(error)
