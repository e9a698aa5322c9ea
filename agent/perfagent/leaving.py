"""What the process leaves with: the argument of sys.exit, exit() and quit(), which is nowhere to be seen when it leaves.

A SystemExit that nobody catches is let go of by the interpreter itself, when no Python code runs any more; one that somebody
caught is let go of in the midst of that code. So the exception carries a mark, and where the mark ends tells which it was:
what the script does meanwhile (a log in `finally`, a handler of atexit) does not matter.

Not seen: `raise SystemExit(n)`, for nothing of ours takes part in it.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Leaving"]


class Leaving:
    """Watches the ways to leave; `status` is what the process leaves with.

    progress: changes when the training goes on. It decides where the exception is still held when the process ends (`saved =
    error`, a cycle), so that its mark tells nothing. on_failure: is shown the function that leaves with a status that tells of
    failure, while its variables are still there.
    """

    def __init__(self, progress: Callable[[], object], on_failure: Callable[[FrameType], None]) -> None:
        self._progress, self._on_failure = progress, on_failure
        self._held: weakref.ref[_Mark] | None = None
        self._newest = 0
        self._left: Any = None

    def watch(self) -> None:
        """Puts itself around what raises; the functions are otherwise the same."""
        sys.exit = self._around(sys.exit)
        quitter = sys.modules.get("_sitebuiltins")  # absent under python -S
        if quitter is not None:
            quitter.Quitter.__call__ = self._around(quitter.Quitter.__call__)  # exit() and quit()

    @property
    def status(self) -> Any:
        """As sys.exit takes it; None where nothing was said, or where it was caught."""
        mark = self._held() if self._held is not None else None
        if mark is not None and mark.seen == self._progress():
            return mark.status
        return self._left

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def exit(*arguments: Any, **named: Any) -> None:  # noqa: A001 - it stands for sys.exit
            try:
                original(*arguments, **named)
            except SystemExit as error:
                if threading.current_thread() is threading.main_thread():  # another thread's ends that thread
                    self._mark(error)
                    if error.code not in (None, 0):
                        self._on_failure(sys._getframe(1))
                raise

        exit.__doc__ = original.__doc__
        return exit

    def _mark(self, error: SystemExit) -> None:
        self._newest += 1
        mark = _Mark(self._leave, self._newest, error.code, self._progress())
        self._held, self._left = weakref.ref(mark), None
        error._perfagent_mark = mark  # type: ignore[attr-defined]

    def _leave(self, number: int, status: Any) -> None:
        if number == self._newest:  # an older one may end with it: as its context
            self._left = status


class _Mark:
    """Lives as long as the exception that carries it."""

    def __init__(self, leave: Callable[[int, Any], None], number: int, status: Any, seen: object) -> None:
        self._leave, self._number, self.status, self.seen = leave, number, status, seen

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:  # nobody calls: the interpreter is on its way out
            self._leave(self._number, self.status)
