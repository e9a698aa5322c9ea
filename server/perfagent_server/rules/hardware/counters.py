"""Counters of devices that go up from whenever the driver was loaded, or from the device's first day: only what they gain
during the run is about the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from perfagent_server.rules.window import Window

__all__ = ["follow_gains", "newest_of"]


def follow_gains(window: Window, state: dict[str, Any], names: Iterable[str]) -> dict[str, dict[int, float]]:
    """What each counter has gained on which ranks since this attempt was first seen; only those that gained. state: a
    rule's own, {} at first. A counter that went back (the driver was loaded anew) begins anew."""
    last: dict[str, dict[str, float]] = state.setdefault("last", {})
    gained: dict[str, dict[str, float]] = state.setdefault("gained", {})
    for name in names:
        known = last.setdefault(name, {})
        for rank, value in newest_of(window, name).items():
            before = known.get(str(rank), value)
            if value > before:
                of_ranks = gained.setdefault(name, {})
                of_ranks[str(rank)] = of_ranks.get(str(rank), 0.0) + value - before
            known[str(rank)] = value
    return {name: {int(rank): gain for rank, gain in of_ranks.items()} for name, of_ranks in gained.items()}


def newest_of(window: Window, name: str) -> dict[int, float]:
    """The newest reading of each rank's own device; empty where none sends it."""
    readings = window.by_time.get(name)
    if readings is None:
        return {}
    return {rank: value for rank in readings.ranks if (value := readings.newest(rank)) is not None}
