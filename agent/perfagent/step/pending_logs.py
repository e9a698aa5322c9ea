"""Holds log() calls that cannot be written down yet: their step is not known, or their values are still on a device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from perfagent.device import Reading, ready, value_of

__all__ = ["EarlyLog", "LoggedLater"]

_EARLY_S = 5.0


class LoggedLater:
    """A log() call with values that are still on a device."""

    __slots__ = ("_metrics", "_monotonic", "_step", "_time")

    def __init__(self, step: int, wall: float, monotonic: float, metrics: dict[str, Any]) -> None:
        self._step, self._time, self._monotonic, self._metrics = step, wall, monotonic, metrics

    def ready(self) -> bool:
        return all(map(ready, self._metrics.values()))

    def row(self) -> tuple[int, float, float, Mapping[str, Any]]:
        return self._step, self._time, self._monotonic, read(self._metrics)


class EarlyLog:
    """A log() call before the first backward pass, whose step is not known yet. goes_on: the next call is
    of the same step."""

    __slots__ = ("_metrics", "_monotonic", "_step", "_time", "goes_on")

    def __init__(self, wall: float, monotonic: float, metrics: dict[str, Any], commit: bool | None = None) -> None:
        self._time, self._monotonic, self._metrics = wall, monotonic, metrics
        self.goes_on = not (commit is None or commit)
        self._step: int | None = None

    @property
    def settled(self) -> bool:
        return self._step is not None

    @property
    def step(self) -> int | None:
        return self._step

    def settle(self, step: int) -> None:
        self._step = step

    def settle_without_optimizer(self, step: int) -> None:
        """step: what log() calls have counted up to."""
        self.settle(step)

    def age_s(self, now: float) -> float:
        return now - self._monotonic

    def waits_too_long(self) -> bool:
        return self._step is None and self.age_s(time.monotonic()) > _EARLY_S

    def ready(self) -> bool:
        return self._step is not None and all(map(ready, self._metrics.values()))

    def row(self) -> tuple[int, float, float, Mapping[str, Any]]:
        assert self._step is not None
        return self._step, self._time, self._monotonic, read(self._metrics)


def read(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value_of(value) if isinstance(value, Reading) else value for name, value in metrics.items()}
