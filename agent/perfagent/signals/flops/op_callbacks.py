"""Finds and removes the callbacks that torch runs around each operator on this thread.

Torch itself removes a recorder's callback, once, by a number. It forgets that number when it returns what was
recorded so far, or when the recorder ends inside a backward pass. A callback that stays takes the next profiler of
this thread for its recorder and writes into it: training hangs, or its memory is corrupted (torch 2.13). Python has a
function that removes all callbacks, including those of other threads and libraries; only C++ has one for this thread,
under its mangled name.

An operator or range that begins while callbacks are off has none at its end either. That is needed for ranges that a
script names: at its end, a range would call a recorder's callback, whatever profiler the script had started within it.
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
    """The C++ functions in the library that torch has loaded: bool at::hasThreadLocalCallbacks(), void
    at::clearThreadLocalCallbacks(), bool at::hasGlobalCallbacks(), bool at::isRecordFunctionEnabled()."""

    has: Any
    clear: Any
    has_global: Any
    enabled: Any


@cache
def _functions() -> _Functions | None:
    try:
        library = ctypes.CDLL(str(Path(sys.modules["torch"].__file__ or "").parent / "lib" / "libtorch_cpu.so"))
        found = _Functions(*(getattr(library, name) for name in (_HAS, _CLEAR, _HAS_GLOBAL, _ENABLED)))
    except (OSError, AttributeError):  # another system, or a custom build
        return None
    found.clear.restype = None
    for asks in (found.has, found.has_global, found.enabled):
        asks.restype = ctypes.c_bool
    return found


def can_clear_here() -> bool:
    """True if this thread's callbacks can be removed without all others."""
    return _functions() is not None


def any_here() -> bool:
    """True if this thread, or all threads, have callbacks. Without the C++ functions: True if a profiler is on."""
    functions = _functions()
    return bool(
        functions.has() or functions.has_global() if functions else sys.modules["torch"].autograd._profiler_enabled()
    )


def clear_here() -> None:
    """Removes the callbacks of this thread; all callbacks if that is not possible."""
    functions = _functions()
    if functions is not None:
        functions.clear()
    else:
        sys.modules["torch"]._C._autograd._clear_callbacks()


def are_on_here() -> bool:
    """True if operators that begin on this thread run callbacks; assumed (torch's default) if that cannot be read."""
    functions = _functions()
    return functions is None or bool(functions.enabled())


def turn_here(*, on: bool) -> None:
    """Turns callbacks on or off for operators that begin on this thread from here on."""
    sys.modules["torch"].autograd._enable_record_function(on)
