"""Reports the end of the process to the current run: at exit, at the end of a worker, and of a thread that died."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from perfagent.boundary.guard import guarded
from perfagent.process.exit_reason import Leaving, cause, handled
from perfagent.step.state import state

if TYPE_CHECKING:
    from types import FrameType

    from perfagent.lifecycle import Lifecycle
    from perfagent.process.exit_reason import Cause

__all__ = ["ProcessEnd"]


class ProcessEnd:
    """What ends this process. current: returns the run of this process, if there is one."""

    def __init__(self, current: Callable[[], Lifecycle | None]) -> None:
        self._current = current
        self._leaving = Leaving(self._progress, self._left_from)
        self._watched = False
        self._worker = 0
        """The process of multiprocessing that is watched: forked children inherit what their parent watched, and not its
        end."""

    def watch(self) -> None:
        """Once a process. One of multiprocessing leaves by os._exit, past atexit, but runs its own finalizers: ours as the
        last of them."""
        if not self._watched:
            self._watched = True
            os.register_at_fork(after_in_child=partial(setattr, state, "current", None))
            atexit.register(self._at_exit)
            self._leaving.watch()
            threading.excepthook = partial(self._thread_ended, threading.excepthook)
        processes = sys.modules.get("multiprocessing.process")
        if processes is not None and processes.parent_process() is not None and self._worker != os.getpid():
            self._worker = os.getpid()
            from multiprocessing.util import Finalize

            Finalize(None, self._at_worker_end, exitpriority=-1000)

    def _progress(self) -> int:
        run = self._current()
        return 0 if run is None else run.newest_step()

    def _left_from(self, frame: FrameType, error: BaseException | None) -> Cause | None:
        run = self._current()
        return None if run is None else run.left_from(frame, error)

    def _thread_ended(
        self, before: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs, /
    ) -> None:
        """Reports a thread of the script that ends with an exception, which Python only prints; the hook that was
        installed before prints it."""
        try:
            self._report_thread(args)
        finally:
            before(args)

    @guarded
    def _report_thread(self, args: threading.ExceptHookArgs) -> None:
        run, error, thread = self._current(), args.exc_value, args.thread
        if run is None or run.ended or error is None or isinstance(error, SystemExit):
            return
        if thread is not None and not thread.name.startswith("perfagent-"):
            run.thread_ended(thread, error)

    def _at_worker_end(self) -> None:
        """Runs while the exception that ended the worker is being handled."""
        run, error = self._current(), sys.exc_info()[1]
        if run is None:
            return
        if error is None or isinstance(error, SystemExit):
            context = None if error is None else handled(error)
            run.at_exit(None if error is None else error.code, None if context is None else cause(context))
        else:
            run.fail(error)

    def _at_exit(self) -> None:
        """No import, no new thread, no eval here: after Ctrl-C any of these turns exit code 130 into 1."""
        # again, while the last of the run is delivered: then it stays in the spool
        with contextlib.suppress(KeyboardInterrupt):
            run = self._current()
            if run is not None:
                run.at_exit(self._leaving.status, self._leaving.because)
