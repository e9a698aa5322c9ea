"""Finds out which status the process leaves with: the argument of sys.exit, exit() or quit(), which Python keeps
nowhere.

A SystemExit that nobody catches is let go of by the interpreter itself, when no Python code runs any more; one that
somebody caught is let go of in the midst of that code. So the exception carries a mark, and where the mark ends shows
which it was:
what the script does meanwhile (a log in `finally`, a handler of atexit) does not matter.

Who catches an exception and leaves with a status that means failure (Hydra, click, many a `main`) leaves because of it.
What runs in the handler may be another attempt, with its own reason to leave: the handler must be near, and a nearby
one that calls something else is believed all but that memory ran out.

Not seen: `raise SystemExit(n)`, for nothing of ours takes part in it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Cause", "Leaving", "handled", "told_from_afar"]

_NEAR = 4
"""Frames from the innermost, that of sys.exit here among them: who calls it, and two above."""
_LONGEST_CHAIN = 8
Cause = tuple[str, str, str, str]
"""State, reason, exception and traceback, as of ending.cause."""
_OWN = (__name__, "_sitebuiltins")
"""The modules of what stands in the place of sys.exit, and of exit()."""


class Leaving:
    """Watches the ways to leave; `status` is what the process leaves with.

    progress: changes when the training goes on. It decides where the exception is still held when the process ends
    (`saved = error`, a cycle), so that its mark shows nothing. on_failure: is called with the function that leaves with
    a status that means failure, while its variables are still there, and with the exception that it is handling.
    """

    def __init__(
        self, progress: Callable[[], object], on_failure: Callable[[FrameType, BaseException | None], Cause | None]
    ) -> None:
        self._progress, self._on_failure = progress, on_failure
        self._held: weakref.ref[_Mark] | None = None
        self._newest = 0
        self._left: Any = None
        self._because: Cause | None = None

    def watch(self) -> None:
        """Puts itself around what raises; the functions are otherwise the same."""
        sys.exit = self._around(sys.exit)
        quitter = sys.modules.get("_sitebuiltins")  # absent under python -S
        if quitter is not None:
            quitter.Quitter.__call__ = self._around(quitter.Quitter.__call__)  # exit() and quit()

    @property
    def status(self) -> Any:
        """A number, or the text that the interpreter prints; None where nothing was said, or where it was caught."""
        mark = self._held() if self._held is not None else None
        status = mark.status if mark is not None and mark.seen == self._progress() else self._left
        return status if status is None or issubclass(type(status), int) else str(status)

    @property
    def because(self) -> Cause | None:
        """What was being handled when it was left with that status: what on_failure made of it."""
        return self._because

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)  # by its name it can be pickled, as the target of a process that is spawned
        def exit(*arguments: Any, **named: Any) -> None:  # noqa: A001 - it stands for sys.exit
            try:
                original(*arguments, **named)
            except SystemExit as error:
                if threading.current_thread() is threading.main_thread():  # another thread's ends that thread
                    # whose exception it is: somebody may have patched sys.exit before us
                    with contextlib.suppress(Exception):
                        self._mark(error)
                        if _tells_of_failure(error.code):
                            context, at_once = handled(error)
                            because = self._on_failure(sys._getframe(1), context)
                            self._because = because if at_once else told_from_afar(because)
                raise

        return exit

    def _mark(self, error: SystemExit) -> None:
        self._newest += 1
        mark = _Mark(self._leave, self._newest, error.code, self._progress())
        self._held, self._left, self._because = weakref.ref(mark), None, None
        error._perfagent_mark = mark  # type: ignore[attr-defined]

    def _leave(self, number: int, status: Any) -> None:
        if number == self._newest:  # an older one may end with it: as its context
            self._left = status


def handled(error: SystemExit) -> tuple[BaseException | None, bool]:
    """The exception in whose handler it was raised, and whether the handler itself left; none that is itself a way to
    leave, as SystemExit and click's Exit are: `except Exception: raise typer.Exit(1)` leaves because of what is behind
    it."""
    link: BaseException = error
    at_once = True
    for _ in range(_LONGEST_CHAIN):
        context = link.__context__
        distance = _distance(link, context)
        if context is None or distance is None or isinstance(context, GeneratorExit):
            break
        at_once = at_once and distance == 0
        if not (isinstance(context, SystemExit) or type(context).__name__ == "Exit"):
            return context, at_once
        link = context
    return None, True


def told_from_afar(because: Cause | None) -> Cause | None:
    """The handler called something else, which left: that may have its own reason."""
    return because and ("failed", *because[1:])


def _distance(error: BaseException, context: BaseException | None) -> int | None:
    """How many calls above the one that raised an exception another one is handled; None where that is far away."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    # one that is in the midst of being raised has no more than its innermost
    outer = frames[0].f_back if frames else None
    while outer is not None and len(frames) < _NEAR:
        frames.insert(0, outer)
        outer = outer.f_back
    inner = [frame for frame in reversed(frames[-_NEAR:]) if frame.f_globals.get("__name__") not in _OWN]
    handler = None if context is None or context.__traceback__ is None else context.__traceback__.tb_frame
    return inner.index(handler) if handler in inner else None


def _tells_of_failure(status: Any) -> bool:
    """As the interpreter reads it; what is no number is printed, and never compared here: it may be a tensor."""
    return status != 0 if issubclass(type(status), int) else status is not None


class _Mark:
    """Lives as long as the exception that carries it, and goes nowhere else with it."""

    def __init__(self, leave: Callable[[int, Any], None], number: int, status: Any, seen: object) -> None:
        self._leave, self._number, self.status, self.seen = leave, number, status, seen

    def __reduce__(self) -> tuple[Any, ...]:  # pools send exceptions from process to process
        return type(None), ()

    def __del__(self) -> None:
        try:
            sys._getframe(1)
        except ValueError:  # nobody calls: the interpreter is on its way out
            self._leave(self._number, self.status)
