"""Whether a run learns, as rules on layers ask: how much of its first loss is left."""

from __future__ import annotations

import math
from statistics import median
from typing import Any

from perfagent.wire import LOSS
from perfagent_server.rules.window import Window

__all__ = ["is_flat", "loss_left"]

_NOW = 9  # losses of which the median is taken
_FLAT = 48  # losses that are flat, or not


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
    """Whether the newest losses keep to one level: their spread (IQR / 1.349) is below a tenth of it. Those of
    reinforcement learning do not."""
    name = window.loss_name
    track = window.by_step.get(name) if name is not None else None
    values = sorted(value for value in track.before(window.step, _FLAT) if math.isfinite(value)) if track else []
    if len(values) < _FLAT:
        return False
    spread = (values[3 * _FLAT // 4] - values[_FLAT // 4]) / 1.349
    return spread < 0.1 * abs(values[_FLAT // 2])
