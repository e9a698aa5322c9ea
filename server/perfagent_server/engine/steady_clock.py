"""The clock of judging: it reads like the wall clock did at the start, and moves like the monotonic one.

A wall clock jumps when it is set, and stands or goes back on machines with a bad one. Whatever is due, waits, or has
lasted for some time would then be due for ever, at once, or never.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["steady"]


def steady(clock: Callable[[], float], monotonic: Callable[[], float]) -> Callable[[], float]:
    """Unix seconds by the wall clock of this moment."""
    offset = clock() - monotonic()
    return lambda: monotonic() + offset
