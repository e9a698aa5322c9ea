"""loss_plateau: the loss does not fall: it never did, and the model is as good as guessing, or it has stopped falling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.loss import guessing
from perfagent_server.rules.loss.loss_series import function_of_loss, recent
from perfagent_server.rules.rule import UNKNOWN, Events, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.window import Window

__all__ = ["LossPlateau"]

_UPDATES, _CLIPPED_SCALED = "update/ratio", "grad/clipped_scaled"
_SMALL_RATIO = 1e-4  # where gradients were clipped with the loss scale on them, as in update_ratio
_MOST_BLOCKS = 128
_FIRST = 10  # values that say where the loss began
_LATE_SHARE = 0.05


@dataclass(frozen=True, kw_only=True)
class LossPlateau(Rule):
    """A run that began from scratch and is still where guessing would put it (guessing.py) has learned nothing: a warning.
    While the learning rate rises nothing is judged.

    A plateau: with twice the standard error of the difference on top, the loss is known to have improved by less than
    improved_pct; nor did it rise by as much. A loss that is not positive, or varies by more than its level, is
    measured by its spread. On 31 healthy pre-training curves such a test is true at some time for most, late in the run: it
    is how a good training ends. So this is a remark, once it was so for held_steps, and it says if the learning rate is
    nearly used up. Where the loss never fell below its first values at all, it says that instead.
    """

    guess_steps: int = within(300, least=75, most=100_000)
    flat_steps: int = 500
    broadcast_steps: int = 50
    near_pct: float = 2.5
    tiny_ratio: float = 1e-6
    least_steps: int = 1000
    run_pct: float = 25.0
    improved_pct: float = 0.4
    spread_pct: float = 20.0
    held_steps: int = 250

    id: ClassVar[str] = "loss_plateau"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("overfit",)
    reads = (
        Series(LOSS, keep=64, judged=True), Series("lr", merge="max"), Series(_UPDATES, keep=8), Events("loss", keep=1),
        Series(_CLIPPED_SCALED, merge="max"),
    )  # fmt: skip
    charts = (LOSS,)
    life = Life(clear_steps=2, restated=True)
    state_version = 3

    def judge(self, window: Window) -> Finding | Unknown | None:
        series = window.loss_name
        track = None if series is None else window.by_step.get(series)
        value = None if track is None else track.value
        if series is None or value is None or not math.isfinite(value):
            return UNKNOWN
        # guessed: whether it was a guess at the last look; blocks: [values, their sum, the sum of their squares, first step];
        # each holds up to `size` values; first: the sum of the first 10 values; since: the step from which it is a plateau
        begin = {
            "series": series, "guessed": False, "count": 0, "size": 25, "first": 0.0, "offset": value, "blocks": [],
            "since": None,
        }  # fmt: skip
        state = window.state_of(self, begin)
        if state["series"] != series:
            state.update(begin)
        is_full = _add(state, value, window.at)
        guess = self._guess(window, series, state) if is_full else UNKNOWN
        plateau = self._plateau(window, state) if is_full and state["count"] >= self.least_steps else UNKNOWN
        if isinstance(guess, Finding) or state["guessed"]:
            return guess
        if plateau is UNKNOWN and state["since"] is None and state["count"] >= self.guess_steps:
            return None  # it was no guess at the last look, nor a plateau
        return plateau

    def _guess(self, window: Window, series: str, state: dict[str, Any]) -> Finding | Unknown | None:
        if window.start_step:
            return None  # it goes on from a checkpoint, which may have learned all there is
        rose = window.learning_rate.last_rise or 0
        if rose > 1 and window.at - rose < self.guess_steps // 2:
            return UNKNOWN
        means = [state["offset"] + block[1] / block[0] for block in state["blocks"]]
        found = guessing.guessing(
            state["first"] / _FIRST, means, state["count"], function_of_loss(window), least=self.guess_steps,
            flat=self.flat_steps, broadcast=self.broadcast_steps, near=self.near_pct / 100,
        )  # fmt: skip
        state["guessed"] = found is not None
        if found is None:
            return None
        ratio = window.value(_UPDATES)
        cause = found.cause
        if cause == "guess" and ratio is not None and 0 <= ratio < _SMALL_RATIO:
            is_clipped = bool(window.value(_CLIPPED_SCALED))
            cause = "clipped scaled" if is_clipped else "tiny steps" if ratio < self.tiny_ratio else cause
        return self.found(
            "warning" if found.is_sure else "info",
            cause=cause,
            since_step=1,
            evidence={"series": series, **found.figures, "lr": window.value("lr"), "update_ratio": ratio},
        )

    def _plateau(self, window: Window, state: dict[str, Any]) -> Finding | Unknown | None:
        found = self._judge(window, state)
        state["since"] = None if found is None else window.at if state["since"] is None else state["since"]
        is_new = found is not None and not window.is_firing(self.id)
        return UNKNOWN if is_new and window.at - state["since"] < self.held_steps else found

    def _judge(self, window: Window, state: dict[str, Any]) -> Finding | None:
        wanted = max(self.least_steps, int(self.run_pct / 100 * state["count"]))
        chosen: list[list[float]] = []
        for block in reversed(state["blocks"]):
            chosen.append(block)
            if sum(one[0] for one in chosen) >= wanted:
                break
        half = len(chosen) // 2
        count, now, variance = _moments(chosen[:half], state["offset"])
        count_before, before, variance_before = _moments(chosen[half:], state["offset"])
        error = math.sqrt(variance / count + variance_before / count_before)
        level, spread = abs(now), math.sqrt(variance)
        scale = self.improved_pct / 100 * level if now > spread else self.spread_pct / 100 * spread
        improved = before - now
        if not -scale < improved < scale - 2 * error:
            return None
        first = state["first"] / _FIRST
        never = first - now < max(0.02 * abs(first), 0.5 * spread)
        lr, peak = window.value("lr"), window.learning_rate.peak
        since, over = int(chosen[-1][3]), count + count_before
        left_pct = 100 * lr / peak if lr is not None and peak > 0 else None
        is_late = lr is not None and peak > 0 and lr <= _LATE_SHARE * peak
        return self.found(
            "info",
            cause="never fell" if never else "late" if is_late else "",
            since_step=since,
            evidence={
                **recent(window), "step": window.at, "since_step": since, "mean": now, "mean_before": before,
                "standard_error": error, "values": over, "first": first, "lr_peak": peak if lr is not None else None,
                "lr_left_pct": left_pct,
            },
        )  # fmt: skip


def _add(state: dict[str, Any], value: float, step: int) -> bool:
    """Adds a value; whether it filled a block. When there are too many blocks, two become one."""
    state["count"] += 1
    if state["count"] <= _FIRST:
        state["first"] += value
    blocks: list[list[float]] = state["blocks"]
    if not blocks or blocks[-1][0] >= state["size"]:
        blocks.append([0, 0.0, 0.0, step])
    block, off = blocks[-1], value - state["offset"]
    block[0] += 1
    block[1] += off
    block[2] += off * off
    if len(blocks) > _MOST_BLOCKS:
        pairs = zip(blocks[0::2], blocks[1::2], strict=False)
        rest = blocks[len(blocks) // 2 * 2 :]
        state["blocks"] = [[a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3]] for a, b in pairs] + rest
        state["size"] *= 2
    return bool(block[0] >= state["size"])


def _moments(blocks: list[list[float]], offset: float) -> tuple[float, float, float]:
    """(count, mean, variance) of the values of some blocks."""
    count = sum(block[0] for block in blocks)
    mean = sum(block[1] for block in blocks) / count
    square = sum(block[2] for block in blocks) / count
    return count, offset + mean, max(0.0, square - mean * mean)
