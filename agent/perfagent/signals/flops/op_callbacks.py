"""What torch calls around each operator on this thread: asked for, and taken out.

A recorder's callback is torch's to take out, once, by a number that it forgets when it is asked for what was recorded so far, or
when the recorder is ended inside of a backward pass. A callback that stays takes the next profiler of this thread for its
recorder, and writes into it: the training hangs, or its memory is spoilt (torch 2.13). Python has a function that takes out all
callbacks, those of other threads and of other people as well; the one for this thread is C++'s alone, under its mangled name.

What begins while they are off has none when it ends, either. That is for ranges that a script names: one would call a recorder's
callback at its end, whatever profiler of the script's had begun in the midst of it.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["any_here", "are_on_here", "can_clear_here", "clear_here", "turn_here"]

_CLEAR = "_ZN2at25clearThreadLocalCallbacksEv"
_HAS, _HAS_GLOBAL = "_ZN2at23hasThreadLocalCallbacksEv", "_ZN2at18hasGlobalCallbacksEv"
_ENABLED = "_ZN2at23isRecordFunctionEnabledEv"


class _Functions(NamedTuple):
    """Those of C++ in the library that torch has loaded: bool at::hasThreadLocalCallbacks(),
    void at::clearThreadLocalCallbacks(), bool at::hasGlobalCallbacks(), bool at::isRecordFunctionEnabled()."""

    has: Any
    clear: Any
    has_global: Any
    enabled: Any


@cache
def _functions() -> _Functions | None:
    try:
        library = ctypes.CDLL(str(Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libtorch_cpu.so"))
        found = _Functions(*(getattr(library, name) for name in (_HAS, _CLEAR, _HAS_GLOBAL, _ENABLED)))
    except (OSError, AttributeError):  # another system, a build of somebody's own
        return None
    found.clear.restype = None
    for asks in (found.has, found.has_global, found.enabled):
        asks.restype = ctypes.c_bool
    return found


def can_clear_here() -> bool:
    """Whether this thread's callbacks can be taken out without all others'."""
    return _functions() is not None


def any_here() -> bool:
    """Whether there are callbacks of this thread or of all; where only profilers can be asked for, whether there is one."""
    functions = _functions()
    return bool(functions.has() or functions.has_global() if functions else sys.modules["torch"].autograd._profiler_enabled())


def clear_here() -> None:
    """Takes out the callbacks of this thread; where that cannot be done alone, all."""
    functions = _functions()
    if functions is not None:
        functions.clear()
    else:
        sys.modules["torch"]._C._autograd._clear_callbacks()


def are_on_here() -> bool:
    """Whether what begins on this thread calls any of them; where that cannot be asked, as it is with torch's default."""
    functions = _functions()
    return functions is None or bool(functions.enabled())


def turn_here(*, on: bool) -> None:
    """From here on what begins on this thread calls them, or does not."""
    sys.modules["torch"].autograd._enable_record_function(on)
