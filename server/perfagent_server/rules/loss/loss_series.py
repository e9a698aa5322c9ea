"""What rules on the loss share: its finite values, how far it has come down, and what the agent told of its function."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perfagent.wire import LOSS
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["bad_in_a_row", "finite", "function_of_loss", "has_fallen", "is_cross_entropy", "recent", "worth_telling"]


def finite(series: StepSeries) -> list[float]:
    """The values that are kept and are numbers. Not all that happens to be in memory: a restarted server has no more than
    series.size."""
    return [value for value in series.last(series.size) if math.isfinite(value)]


def bad_in_a_row(values: list[float]) -> int:
    """How many of the newest values are not finite."""
    return next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))


def recent(window: Window) -> dict[str, Any]:
    """What evidence shows of the loss and the rate now."""
    track = window.series(window.loss_name or LOSS)
    return {"series": window.loss_name, "last_losses": track.last(50) if track else [], "lr": window.value("lr")}


def function_of_loss(window: Window) -> Mapping[str, Any]:
    """The newest event "loss" (agent: measure/loss_function.py), {} before the first. A rule that asks reads that event."""
    told = window.events("loss")
    return told[-1].data if told else {}


def is_cross_entropy(window: Window) -> bool:
    """Whether the loss is a cross entropy, which must fall. Other losses may climb in a healthy run: that of a critic or a
    GAN, or a VAE's with an annealed KL weight."""
    return bool(function_of_loss(window).get("kind") == "cross_entropy")


def has_fallen(first: float, level: float, *, to: float = 0.75) -> bool:
    """Whether the run has learned something: its loss fell to this share of its first value."""
    return level <= to * first


def worth_telling(first: float, level: float) -> float:
    """The least rise that undoes something of what was learned: 2 % of the way that the loss came down; 10 % where next
    to nothing is left of it, because there any bad batch is a multiple of the level. 0 for a loss that never fell."""
    share = 0.1 if abs(level) < 0.1 * first else 0.02
    return share * (first - level) if first > level else 0.0
