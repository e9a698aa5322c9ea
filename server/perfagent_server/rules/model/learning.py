"""Whether a run learns, as rules on layers ask: how much of its first loss is left."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from perfagent.wire import LOSS
from perfagent_server.rules.window import Window

__all__ = ["is_flat", "is_restless", "loss_left"]

_NOW = 9  # losses of which the median is taken
_MANY = 48  # losses of which the spread is taken


def loss_left(window: Window, state: dict[str, Any]) -> float | None:
    """The newest loss as a share of the first. None if it is not known, or not positive: then nothing can be said.

    state: the rule's own, in which the first loss is kept ("first_loss", None at first).
    """
    name = window.loss_name
    track = window.by_step.get(name) if name is not None else None
    if track is None:
        return None
    if state["first_loss"] is None and track.total == track.seen:  # none was dropped yet
        state["first_loss"] = next((value for value in track.values if math.isfinite(value)), None)
    first = state["first_loss"]
    if first is None and name == LOSS:
        first = window.first_loss
    now = [value for value in track.before(window.step, _NOW) if math.isfinite(value)]  # the loss is judged last
    if first is None or first <= 0 or not now:
        return None
    left = median(now) / first
    return left if left > 0 else None


def is_flat(window: Window) -> bool:
    """Whether the newest losses keep to one level: their spread is below a tenth of it."""
    spread, level = _spread(window, window.step)
    return spread < 0.1 * level


def is_restless(window: Window, step: int) -> bool:
    """Whether the losses up to that step vary by nearly as much as they are, or change their sign: as those of reinforcement
    learning do, which learns from what it happens to meet."""
    spread, level = _spread(window, step)
    return 0.3 * level < spread < math.inf


def _spread(window: Window, step: int) -> tuple[float, float]:
    """The spread of the newest losses up to a step (IQR / 1.349), and their level; infinite and 0.0 if there are too few."""
    name = window.loss_name
    track = window.by_step.get(name) if name is not None else None
    values = sorted(value for value in track.before(step, _MANY) if math.isfinite(value)) if track else []
    if len(values) < _MANY:
        return math.inf, 0.0
    return (values[3 * _MANY // 4] - values[_MANY // 4]) / 1.349, abs(values[_MANY // 2])
