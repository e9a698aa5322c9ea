"""Calls of log(), or of another logger, that cannot be written down yet: their step is not known, or their values are still
on a device."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from perfagent.device import Reading, ready, value_of

__all__ = ["CapturedLog", "EarlyLog", "LoggedLater"]

_EARLY_S = 5.0


class LoggedLater:
    """A log() call with values that are still on a device. step: None while it is not known."""

    __slots__ = ("metrics", "monotonic", "step", "wall")

    def __init__(self, step: int | None, wall: float, monotonic: float, metrics: dict[str, Any]) -> None:
        self.step, self.wall, self.monotonic, self.metrics = step, wall, monotonic, metrics

    @property
    def settled(self) -> bool:
        return self.step is not None

    def ready(self) -> bool:
        return self.step is not None and all(map(ready, self.metrics.values()))

    def row(self) -> tuple[int, float, float, Mapping[str, Any]]:
        assert self.step is not None
        values = {
            name: value_of(value) if isinstance(value, Reading) else value for name, value in self.metrics.items()
        }
        return self.step, self.wall, self.monotonic, values


class EarlyLog(LoggedLater):
    """A log() call before the first backward pass. goes_on: the next call is of the same step."""

    __slots__ = ("goes_on",)

    def __init__(self, wall: float, monotonic: float, metrics: dict[str, Any], commit: bool | None = None) -> None:
        super().__init__(None, wall, monotonic, metrics)
        self.goes_on = not (commit is None or commit)

    def settle_without_optimizer(self, step: int) -> None:
        """step: what log() calls have counted up to."""
        self.step = step

    def age_s(self, now: float) -> float:
        return now - self.monotonic

    def waits_too_long(self) -> bool:
        return self.step is None and self.age_s(time.monotonic()) > _EARLY_S


class CapturedLog(EarlyLog):
    """A call of another logger. own_step: its own count, for a process in which no optimizer steps; None where it has none."""

    __slots__ = ("own_step",)

    def __init__(self, metrics: dict[str, Any], step: int | None, own_step: int | None) -> None:
        self.wall, self.monotonic, self.metrics, self.step = time.time(), time.monotonic(), metrics, step
        self.goes_on = True  # so that none of these counts as a step of log()
        self.own_step = own_step

    def settle_without_optimizer(self, step: int) -> None:
        self.step = step if self.own_step is None else self.own_step
