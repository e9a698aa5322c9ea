"""The variables of functions that are being executed, looked at without leaving a trace in them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

__all__ = ["variables_of"]

_OPTIMIZED = 0x1  # inspect.CO_OPTIMIZED: the variables are no dict
_READS_ITS_OWN = frozenset(("locals", "vars", "dir", "eval", "exec"))


@contextlib.contextmanager
def variables_of(frame: FrameType) -> Iterator[list[tuple[str, Any]]]:
    """The local variables of a function that is being executed.

    Up to Python 3.12 a function's `f_locals` is a dict that stays with the frame and keeps every object in it alive
    until the function returns, so it is emptied again (as numexpr does). It is also what `locals()` hands out: a
    function that uses that name, or whose dict somebody holds, is left alone.
    """
    code = frame.f_code
    if not code.co_flags & _OPTIMIZED:
        yield list(frame.f_globals.items()) if frame.f_locals is frame.f_globals else []
        return
    if sys.version_info >= (3, 13):
        yield list(frame.f_locals.items())
        return
    if sys.gettrace() is not None or not _READS_ITS_OWN.isdisjoint(code.co_names):
        yield []
        return
    held = frame.f_locals
    try:
        yield list(held.items())
    finally:
        if sys.getrefcount(held) <= 3:  # the frame's, ours, and that of the call
            held.clear()
