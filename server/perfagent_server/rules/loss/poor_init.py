"""poor_init: the weights that the run began with keep it from learning."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

import numpy as np

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.loss.guessing import chance_of
from perfagent_server.rules.loss.loss_series import function_of_loss, recent
from perfagent_server.rules.rule import UNKNOWN, Events, Life, Question, Rule, Series, Unknown
from perfagent_server.rules.window import Window

__all__ = ["PoorInit"]

_FAMILY = "grad_norm/"
_GIVEN_UP = 40  # measurements after which a run that learns has begun to
_GIVEN_UP_STEPS = 1000
_FEWEST_LAYERS = 4
_RESUMED, _BEFORE = 3, 48  # losses after a restart, and before it
_TOLD_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class PoorInit(Rule):
    """A largest norm of steep_times that of the median layer is the picture of a depth that gradients do not get
    through; layers that never get a gradient have zeros as weights, or behind them.

    Norms of healthy networks at their start (transformers, CNNs, LSTMs, MLPs; measured) lie within 50 times the
    median; sick ones (12 sigmoid layers, 20 linear ones with a tenth of the right scale) are at 6,000 and more. What
    is so in the first step only (LoRA's B, residual branches that begin at zero) is no fault, and what begins later
    was not there at the start. A run whose loss falls by fallen_pct is well, whatever its gradients.

    A run that goes on from a checkpoint begins with weights, too: where the first three losses are above all before
    the checkpoint, and lost_share of what was learned until then is gone, they were not restored. (Its first loss is that
    of the restored weights, whatever the optimizer does.) A cross entropy, and nothing besides, that begins at guess_times
    that of guessing is sure of what is wrong: its output layer is too large, which does no harm if it comes down soon.
    """

    observations: int = 5
    steep_times: float = 1000.0
    zero_share: float = 0.75
    fallen_pct: float = 3.0
    least_steps: int = 60
    lost_share: float = 0.5
    guess_times: float = 4.0
    guess_steps: int = 200

    id: ClassVar[str] = "poor_init"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("data_repeats",)
    reads = (
        Series(_FAMILY, keep=4, judged=True), Series(LOSS, keep=64, judged=True), Series("lr", merge="max"),
        Events("loss", keep=1),
    )  # fmt: skip
    charts = ("grad/vanishing_share", LOSS)
    life = Life(clear_steps=1, restated=True)
    state_version = 2

    def judge(self, window: Window) -> Finding | Unknown | None:
        # losses: the first ones; measured: how many steps' gradients; steep: how many of the newest in a row; silent: layers
        # without any gradient so far; over: nothing more to judge; lost: what says that weights were not restored
        fresh = {
            "loss_step": -1, "count": 0, "losses": [], "step": -1, "measured": 0, "steep": 0, "silent": None, "over": False,
            "lost": None,
        }  # fmt: skip
        state = window.state_of(self, fresh)
        if state["over"] and not window.is_firing(self.id):
            return None
        series = window.loss_name
        track = None if series is None else window.series(series)
        if series is None or track is None:
            return UNKNOWN
        if track.step != state["loss_step"] and math.isfinite(track.value or 0.0):
            state["loss_step"] = track.step
            state["count"] += 1
            if state["count"] <= _RESUMED:
                state["losses"].append(track.value)
                state["lost"] = self._lost(window, series, state["losses"])
        if state["lost"] is not None and window.at <= window.start_step + _TOLD_STEPS:
            return self._found(window, state, "not restored", **state["lost"])
        self._follow_gradients(window, state)
        state["over"] = state["count"] > (self.guess_steps if state["measured"] >= _GIVEN_UP else _GIVEN_UP_STEPS)
        newest = [value for value in track.last(9) if math.isfinite(value)]
        if not newest or not state["losses"]:
            return UNKNOWN
        first, now = state["losses"][0], median(newest)
        told, is_late = function_of_loss(window), state["count"] >= self.guess_steps
        guess = chance_of(told) if told.get("alone") and is_late and not window.start_step else None
        if guess is not None and now > guess and min(state["losses"]) >= self.guess_times * guess:
            figures = {"loss": now, "steps": state["count"], "guess": guess, "times": first / guess}
            return self._found(window, state, "too large", **figures, classes=told["classes"])
        if first - now > self.fallen_pct / 100 * abs(first):
            return None
        if state["measured"] < self.observations or window.at - window.start_step < self.least_steps:
            return UNKNOWN
        return self._found_in_gradients(window, state, now)

    def _lost(self, window: Window, series: str, losses: list[float]) -> dict[str, float] | None:
        known = window.before.get(series)
        before = [one for one in known.before(window.start_step, _BEFORE) if math.isfinite(one)] if known else []
        first, now = window.loss_before, min(losses)
        if (
            not window.start_step
            or len(losses) < _RESUMED
            or len(before) < _BEFORE // 2
            or not first
            or now <= max(before)
        ):
            return None
        level = median(before)
        share = (now - level) / (first - level) if first > level else 0.0
        figures = {"level": level, "first_loss": first, "now": median(losses), "lost_pct": min(100.0, 100 * share)}
        return figures if share >= self.lost_share else None

    def _follow_gradients(self, window: Window, state: dict[str, Any]) -> None:
        family = window.by_family.get(_FAMILY)
        if family is None or state["measured"] >= _GIVEN_UP:
            return
        layers, steps, norms = family.matrix(window.step - 1)  # the newest step may lack the layers of other ranks
        for column, step in enumerate(steps):
            if step <= state["step"]:
                continue
            state["step"] = step
            values = norms[np.isfinite(norms[:, column]), column]
            if len(values) < _FEWEST_LAYERS:
                continue
            state["measured"] += 1
            largest, middle = float(values.max()), float(np.median(values))
            state["steep"] = state["steep"] + 1 if largest > self.steep_times * middle > 0 else 0
            dead = {layers[place] for place in np.flatnonzero(norms[:, column] == 0)}
            state["silent"] = sorted(dead if state["silent"] is None else dead.intersection(state["silent"]))
            state.update(layers=len(values), largest=largest, median=middle)

    def _found_in_gradients(self, window: Window, state: dict[str, Any], now: float) -> Finding | None:
        silent = state["silent"] or []
        figures = {"loss": now, "steps": state["count"], "measured": state["measured"], "silent": len(silent)}
        if len(silent) >= self.zero_share * state["layers"]:
            return self._found(window, state, "zeros", **figures)
        if state["steep"] == state["measured"]:
            times = state["largest"] / state["median"]
            return self._found(window, state, "", times=times, **figures)
        return None

    def _found(self, window: Window, state: dict[str, Any], cause: str, **figures: float) -> Finding:
        return self.found(
            "info" if cause == "too large" else "warning", cause=cause, since_step=window.start_step + 1,
            evidence={
                "step": window.at, "first": state["losses"][0], **figures, **recent(window),
                "silent_layers": [one.removeprefix(_FAMILY) for one in (state["silent"] or [])[:64]],
                "largest_norm": state.get("largest"), "median_norm": state.get("median"), "layers": state.get("layers"),
            },
        )  # fmt: skip
