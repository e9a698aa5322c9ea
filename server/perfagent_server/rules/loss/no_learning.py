"""no_learning: after hundreds of steps the loss is where guessing would put it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent.wire.limits import whole
from perfagent_server.rules.rule import UNKNOWN, Events, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["NoLearning"]

_UPDATES = "update/ratio"
_FIRST = 10  # values that say where the loss began
_MOST_BLOCKS = 64
_STEADY = ("cross_entropy", "mse", "smooth_l1", "huber")
"""Losses that fall where a model learns. A critic's, or that of two models against each other, need not."""


@dataclass(frozen=True, kw_only=True)
class NoLearning(Rule):
    """The loss of a run that began from scratch is still what a model without knowledge gets: ln C for C classes. Where that
    is not known, it never fell below its first values. The agent reads from autograd's graph which loss it is, of how many
    classes (agent: signals/loss_function.py), and two mistakes that show there: a softmax before a cross entropy, and a
    prediction that was broadcast against its target.

    Values are put together in blocks, whose means count. near_pct: of the guess, in which the newest third must lie, hardly
    below the third before it; no block may have been below by twice that. While the learning rate still rises nothing is judged.
    """

    least_steps: int = 300
    flat_steps: int = 500
    broadcast_steps: int = 50
    near_pct: float = 2.5
    tiny_ratio: float = 1e-6

    id: ClassVar[str] = "no_learning"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("update_ratio",)
    reads = (
        Series(LOSS, judged=True), Series("lr", merge="max"), Series(_UPDATES, keep=8), Events("loss", keep=1),
    )  # fmt: skip
    charts = (LOSS,)
    life = Life(clear_steps=2, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        series = window.loss_name
        value = window.value(series) if series is not None else None
        if series is None or value is None or not math.isfinite(value):
            return UNKNOWN
        if window.start_step:
            return None  # it goes on from a checkpoint, which may have learned all there is
        # blocks: means of `size` values each; part: [count, sum] of the next one
        state = window.state_of(self, {"series": series, "first": [], "size": 25, "part": [0, 0.0], "blocks": []})
        if state["series"] != series:
            state.update(series=series, first=[], size=25, part=[0, 0.0], blocks=[])
        if not _add(state, value):
            return UNKNOWN
        rose = window.learning_rate.last_rise or 0
        if rose > 1 and window.at - rose < self.least_steps // 2:
            return UNKNOWN
        told = [*window.events("loss")]
        return self._judge(window, state, told[-1].data if told else {})

    def _judge(self, window: Window, state: dict[str, Any], loss: dict[str, Any]) -> Finding | Unknown | None:
        blocks, values = state["blocks"], len(state["blocks"]) * state["size"]
        first, lowest = fmean(state["first"]), min(blocks)
        now = fmean(blocks[-max(1, len(blocks) // 3) :])
        guess, fed_by = _guess(loss), loss.get("fed_by")
        figures = {
            "series": state["series"], "level": now, "first": first, "lowest": lowest, "values": values,
            "guess": guess, "classes": whole(loss.get("classes")), "loss_function": loss.get("kind"),
            "lr": window.value("lr"), "update_ratio": window.value(_UPDATES),
        }  # fmt: skip
        broadcast = loss.get("broadcast")
        if isinstance(broadcast, list) and len(broadcast) == 2 and values >= self.broadcast_steps:
            shapes = {"prediction_shape": str(broadcast[0]), "difference_shape": str(broadcast[1])}
            return self._found(window, "warning", "broadcast", figures | shapes)
        if values < self.least_steps:
            return UNKNOWN
        near = self.near_pct / 100
        is_flat = first - lowest <= 2 * near * abs(first) and abs(now - first) <= 4 * near * abs(first)
        if guess is not None:
            is_guess = now >= (1 - near) * guess and lowest >= (1 - 2 * near) * guess
            if is_guess and self._stands(blocks, near) and (now <= (1 + near) * guess or is_flat):
                return self._found(window, "warning", self._cause(window, fed_by), figures)
        if fed_by and self._stands(blocks, near):
            return self._found(window, "warning", "fed by softmax", figures | {"fed_by": str(fed_by)})
        if guess is None and is_flat and loss.get("kind") in _STEADY and values >= self.flat_steps:
            return self._found(window, "info", "flat", figures)
        return None

    def _cause(self, window: Window, fed_by: object) -> str:
        if fed_by:
            return "guess fed by softmax"
        ratio = window.value(_UPDATES)
        return "tiny steps" if ratio is not None and 0 <= ratio < self.tiny_ratio else ""

    @staticmethod
    def _stands(blocks: list[float], near: float) -> bool:
        """Whether the newest third of a run is hardly below the third before it."""
        third = len(blocks) // 3
        before, now = fmean(blocks[-2 * third : -third]), fmean(blocks[-third:])
        return before - now < near * abs(before)

    def _found(self, window: Window, severity: Any, cause: str, figures: dict[str, Any]) -> Finding:
        if isinstance(fed_by := figures.get("fed_by"), str) and figures["classes"]:
            figures["floor"] = _floor(fed_by, figures["classes"])
        return self.found(severity, cause=cause, since_step=window.start_step + 1, evidence=figures)


def _guess(loss: dict[str, Any]) -> float | None:
    classes = whole(loss.get("classes"))
    is_mean = loss.get("kind") == "cross_entropy" and loss.get("mean") is True
    return math.log(classes) if is_mean and classes is not None and classes > 1 else None


def _floor(fed_by: str, classes: int) -> float | None:
    """The least that a cross entropy of probabilities in place of logits can be: of a softmax that is 1 for the right class."""
    return math.log(math.e + classes - 1) - 1 if fed_by == "softmax" else None


def _add(state: dict[str, Any], value: float) -> bool:
    """Adds a value; whether it filled a block. When there are too many blocks, two become one."""
    if len(state["first"]) < _FIRST:
        state["first"].append(value)
    part, blocks = state["part"], state["blocks"]
    part[0] += 1
    part[1] += value
    if part[0] < state["size"]:
        return False
    blocks.append(part[1] / part[0])
    state["part"] = [0, 0.0]
    if len(blocks) >= _MOST_BLOCKS:
        state["blocks"] = [(one + other) / 2 for one, other in zip(blocks[::2], blocks[1::2], strict=True)]
        state["size"] *= 2
    return True
