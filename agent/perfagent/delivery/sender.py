"""The sender thread: its start, its end, and what is left of it in a forked child.

A forked child is inert: its `disabled` is True, its files and its socket are let go without a word, and nothing is
started in it.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from perfagent.delivery.handoff import Flush, Handoff
from perfagent.delivery.wakeup import start_deaf
from perfagent.device import device_was_read, leak_in_forked_child

if TYPE_CHECKING:
    from perfagent.agent_config import AgentConfig
    from perfagent.delivery.send_loop import SendLoop
    from perfagent.delivery.spool import Spool
    from perfagent.delivery.transport import Transport
    from perfagent.identity import Identity

__all__ = ["Sender"]

AGAIN_S = 1.0


class Sender(Handoff):
    """Delivers what is handed to it."""

    def __init__(
        self,
        config: AgentConfig,
        identity: Identity,
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause_s: Callable[[int], float] | None = None,
    ) -> None:
        """pause_s: seconds until the next try after so many failures in a row."""
        super().__init__(config, identity, clock)
        self._transport, self._pause_s = transport, pause_s
        self._send_loop: SendLoop | None = None
        self._making = threading.Lock()  # never taken by the training thread's hooks, nor in a forked child
        self.closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        # register_at_fork cannot be undone, so it must not keep us alive
        forget = weakref.WeakMethod(self._in_forked_child)
        os.register_at_fork(after_in_child=lambda: (method := forget()) and method())

    # ---- called by the session, on any thread

    def start(self) -> None:
        """Starts the sender thread, once. Does nothing in a forked child or when disabled; never raises."""
        if self.disabled or self._thread is not None or os.getpid() != self._pid or not self._import():
            return
        thread = threading.Thread(target=self._run, name="perfagent-sender", daemon=True)
        try:
            start_deaf(thread)
        except RuntimeError as error:  # at interpreter shutdown, or at the limit of the user's processes
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

    def flush(self, timeout_s: float) -> bool:
        """Asks for delivery of all that was handed in before; True when the server has it within the time."""
        if self.disabled or self._thread is None or not self._thread.is_alive():
            return False
        request = Flush(self.clock() + timeout_s)
        self.flushes.append(request)
        self.wake.ring()
        request.done.wait(timeout_s)
        return request.delivered

    def close(
        self, state: str, reason: str | Mapping[str, str | int] = "", timeout_s: float = 1.5, **more: object
    ) -> None:
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

    # ---- forking

    def _in_forked_child(self) -> None:
        """No lock, no logging, no thread: other threads may have held any lock at the moment of the fork."""
        self.disabled = True
        if device_was_read() or (self.progress is not None and self.progress.clock is not None):
            leak_in_forked_child(self, [*self.rows], [*self.sources])
        for handed in (self.rows, self.events, self.sources, self.slow_sources):
            handed.clear()
        if self._send_loop is not None:
            self._send_loop.exchange.forked()

    # ---- the sender thread

    @property
    def send_loop(self) -> SendLoop:
        """What the sender's thread does. A test may drive it instead of `start`, by the clock that it gave."""
        with self._making:
            if self._send_loop is None:
                # not with this module: `import perfagent` is to be quick
                from perfagent.delivery.send_loop import SendLoop

                self._send_loop = SendLoop(self, self._transport, self._pause_s)
            return self._send_loop

    def _run(self) -> None:
        """Where the errors of this thread end: counted, logged once, begun again once, then the agent is off."""
        for attempt in (1, 2):
            try:
                self.send_loop.run()
                break
            except BaseException as error:  # noqa: BLE001 - the training must go on whatever is wrong with us, SystemExit included
                self.counters["errors"] += 1
                why = f"{type(error).__name__}: {error}"
                if attempt == 2:
                    self._disable(why)
                    break
                self.tell("error", logging.WARNING, f"perfagent: internal error, starting over: {why}")
                if self.closing_at is None:  # what was missing (memory, a file descriptor) may be back in a moment
                    self.wake.wait(AGAIN_S if self._pause_s is None else self._pause_s(1))
        self.closed.set()

    def _disable(self, why: str) -> None:
        self.disabled = True
        self.rows.clear()
        said = f"perfagent: switched off for this process: {why}; training goes on unmonitored"
        self.tell("disabled", logging.WARNING, said)
