"""What torch calls around each operator on this thread: asked for, and taken out.

A recorder's callback is torch's to take out, once, by a number that it forgets when it is asked for what was recorded so far, or
when the recorder is ended inside of a backward pass. A callback that stays takes the next profiler of this thread for its
recorder, and writes into it: the training hangs, or its memory is spoilt (torch 2.13). Python has a function that takes out all
callbacks, those of other threads and of other people as well; the one for this thread is C++'s alone, under its mangled name.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["any_here", "can_clear_here", "clear_here"]

_HAS, _CLEAR = "_ZN2at23hasThreadLocalCallbacksEv", "_ZN2at25clearThreadLocalCallbacksEv"


@cache
def _functions() -> tuple[Any, Any] | None:
    """bool at::hasThreadLocalCallbacks() and void at::clearThreadLocalCallbacks(), of the library that torch has loaded."""
    try:
        library = ctypes.CDLL(str(Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libtorch_cpu.so"))
        has, clear = getattr(library, _HAS), getattr(library, _CLEAR)
    except (OSError, AttributeError):  # another system, a build of somebody's own
        return None
    has.restype, clear.restype = ctypes.c_bool, None
    return has, clear


def can_clear_here() -> bool:
    """Whether this thread's callbacks can be taken out without all others'."""
    return _functions() is not None


def any_here() -> bool:
    """Whether there are callbacks of this thread; where only profilers can be asked for, whether there is one."""
    functions = _functions()
    return bool(functions[0]() if functions else sys.modules["torch"].autograd._profiler_enabled())


def clear_here() -> None:
    """Takes out the callbacks of this thread; where that cannot be done alone, all."""
    functions = _functions()
    if functions is not None:
        functions[1]()
    else:
        sys.modules["torch"]._C._autograd._clear_callbacks()
