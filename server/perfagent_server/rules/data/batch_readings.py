"""What the agent saw in batches, as rules read it: a reading every two seconds while batches are looked at."""

from __future__ import annotations

import numpy as np

from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = ["reading_of", "readings"]


def reading_of(name: str, *, keep: int) -> Series:
    """The series as a rule declares it. keep: how many readings, ranks put together."""
    return Series(name, keep=keep, axis="time", judged=True)


def readings(window: Window, name: str, count: int) -> list[float]:
    """The newest readings, oldest first; at most `count`."""
    series = window.by_time.get(name)
    if series is None:
        return []
    seconds = series.seconds()
    values: list[float] = np.divide(seconds.total, seconds.count)[-count:].tolist()
    return values
