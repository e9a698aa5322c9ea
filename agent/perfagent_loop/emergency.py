"""Makes a save urgent: at a signal that ends the process, or an exception that nobody catches.

The handler of a signal only notes it; the loop saves at the end of the step at hand, and then the signal does what it
would have done: the user's own handler is called, or the process ends by it. A second signal, or a step that does not
end within the grace time, goes through at once. Nothing is installed before a loop's first step."""

from __future__ import annotations

import _thread
import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from perfagent.session import current

__all__ = ["Emergency"]

logger = logging.getLogger("perfagent")
_NOT_OURS = object()


class Emergency:
    """Signals and uncaught exceptions of this process.

    signum: the signal that came and has not been passed on; 0 for none. on_exception: called with an exception that
    ends the process, after its traceback is printed. grace_s: how long a signal waits for the step to end."""

    def __init__(self, on_exception: Callable[[BaseException], None], *, grace_s: float) -> None:
        self.signum = 0
        self._on_exception, self._grace_s = on_exception, grace_s
        self._previous: Any = _NOT_OURS
        self._excepthook: Any = None
        self._serial = 0

    def install(self) -> None:
        """Keeps what was there before, to be called afterwards. Signals can only be handled from the main thread."""
        if self._excepthook is None:
            self._excepthook, sys.excepthook = sys.excepthook, self._uncaught
        if threading.current_thread() is not threading.main_thread():
            logger.warning("perfagent: no save on SIGTERM: the loop runs beside the main thread, which handles signals")
        elif self._previous is _NOT_OURS:
            self._previous = signal.signal(signal.SIGTERM, self._noted)

    def remove(self) -> None:
        """Puts back what was there before, where nobody has put in something else since."""
        if self._excepthook is not None and sys.excepthook == self._uncaught:
            sys.excepthook = self._excepthook
        self._excepthook = None
        if threading.current_thread() is threading.main_thread():
            if self._previous is not _NOT_OURS and signal.getsignal(signal.SIGTERM) == self._noted:
                signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._previous = _NOT_OURS

    @property
    def ends_the_process(self) -> bool:
        """Whether the signal's default action follows, and no handler of the script's."""
        return self._previous in (None, signal.SIG_DFL, _NOT_OURS)

    def pass_on(self, signum: int, *, interrupting: bool = False) -> None:
        """The signal does now what it would have done without us; returns where that is nothing or a handler."""
        self.signum = 0
        self._serial += 1  # the grace time of this one is over
        if self.ends_the_process:
            signal.signal(signum, signal.SIG_DFL)  # one more ends it at once
            _end_run(interrupting=interrupting)
            os.kill(os.getpid(), signum)  # the whole process, as from outside; threads do not outlive it
            signal.pause()
        elif callable(self._previous):
            self._previous(signum, None)

    def release(self) -> None:
        """After remove(): a signal that came after the last step does now what it would have done."""
        signum, self.signum = self.signum, 0
        self._serial += 1
        if signum:
            if signal.getsignal(signum) == signal.SIG_DFL:
                _end_run(interrupting=False)
            os.kill(os.getpid(), signum)

    def _noted(self, signum: int, _: FrameType | None) -> None:
        if self.signum:
            self.pass_on(signum, interrupting=True)
            return
        self.signum = signum
        self._serial += 1
        # No threading.Thread: it takes locks that the interrupted code may hold.
        _thread.start_new_thread(self._insist, (signum, self._serial, self._grace_s))

    def _insist(self, signum: int, serial: int, grace_s: float) -> None:
        time.sleep(grace_s)
        if self.signum == signum and self._serial == serial:
            os.kill(os.getpid(), signum)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        (self._excepthook or sys.__excepthook__)(kind, error, trace)
        self._on_exception(error)


def _end_run(*, interrupting: bool) -> None:
    """A signal is about to end the process, past the exit handlers: the run ends first. interrupting: code that may
    hold locks which the rest of an end takes."""
    run = current()
    if run is not None:
        with contextlib.suppress(Exception):  # the signal ends the process, whatever becomes of the run
            (run._sender.close if interrupting else run._end)("preempted", {"key": "terminated"})
