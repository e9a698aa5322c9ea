"""Whether a loss is, after hundreds of steps, where guessing would put it: what a model without knowledge gets.

Of a cross entropy over C classes that is ln C. The agent reads from autograd's graph which loss it is, of how many classes,
and two mistakes that show there: a softmax before a cross entropy, and a prediction that was broadcast against its target
(agent: measure/loss_function.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from perfagent.wire.limits import whole

__all__ = ["Guess", "chance_of", "guessing"]

_MOST_TIMES = 8.0
"""A flat loss that is more than so many times the guess has another part, which hides what the first one does."""
_STEADY = ("cross_entropy", "mse", "smooth_l1", "huber")
"""Losses that fall where a model learns. A critic's, or that of two models against each other, need not."""


class Guess(NamedTuple):
    """cause: "" where the loss is the guess, and nothing says why; is_sure: it must be told, not only remarked."""

    cause: str
    is_sure: bool
    figures: dict[str, Any]


def guessing(
    first: float,
    blocks: list[float],
    values: int,
    loss: Mapping[str, Any],
    *,
    least: int,
    flat: int,
    broadcast: int,
    near: float,
) -> Guess | None:
    """first: the mean of the first losses; blocks: the means of as many `values` in a row, oldest first; loss: what the
    agent told of it, {} where it told nothing; least, flat, broadcast: values before it is judged; near: share of the
    guess in which the newest third must lie, hardly below the third before it; no stretch may have been below by twice
    that."""
    lowest, now = min(blocks), fmean(blocks[-max(1, len(blocks) // 3) :])
    chance, fed_by, shapes = chance_of(loss), loss.get("fed_by"), loss.get("broadcast")
    figures = {
        "level": now, "first": first, "lowest": lowest, "values": values, "guess": chance, "fed_by": fed_by,
        "classes": whole(loss.get("classes")), "loss_function": loss.get("kind"),
    }  # fmt: skip
    if isinstance(shapes, list) and len(shapes) == 2 and values >= broadcast:
        figures |= {"prediction_shape": str(shapes[0]), "difference_shape": str(shapes[1])}
        return Guess("broadcast", is_sure=True, figures=figures)
    if values < least:
        return None
    is_flat = first - lowest <= 2 * near * abs(first) and abs(now - first) <= 4 * near * abs(first)
    if chance is not None:
        is_guess = now >= (1 - near) * chance and lowest >= (1 - 2 * near) * chance
        is_near = now <= (1 + near) * chance or (is_flat and now <= _MOST_TIMES * chance)
        if is_guess and is_near and _stands(blocks, near):
            return Guess("guess fed by softmax" if fed_by else "guess", is_sure=True, figures=figures)
    if fed_by and _stands(blocks, near):
        return Guess("fed by softmax", is_sure=True, figures=figures | {"floor": _floor(loss)})
    if chance is None and is_flat and loss.get("kind") in _STEADY and values >= flat:
        return Guess("flat", is_sure=False, figures=figures)
    return None


def chance_of(loss: Mapping[str, Any]) -> float | None:
    """The cross entropy of guessing, where the loss is the mean of one."""
    classes = whole(loss.get("classes"))
    is_mean = loss.get("kind") == "cross_entropy" and loss.get("mean") is True
    return math.log(classes) if is_mean and classes is not None and classes > 1 else None


def _floor(loss: Mapping[str, Any]) -> float | None:
    """The least that a cross entropy of probabilities in place of logits can be: of a softmax that is 1 for the right class."""
    classes = whole(loss.get("classes"))
    return math.log(math.e + classes - 1) - 1 if loss.get("fed_by") == "softmax" and classes else None


def _stands(blocks: list[float], near: float) -> bool:
    """Whether the newest third of a run is hardly below the third before it."""
    third = len(blocks) // 3
    before, now = fmean(blocks[-2 * third : -third]), fmean(blocks[-third:])
    return before - now < near * abs(before)
