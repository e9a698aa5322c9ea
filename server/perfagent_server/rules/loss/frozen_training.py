"""frozen_training: steps are made, and nothing moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding, Severity
from perfagent_server.rules.loss import zero_rate
from perfagent_server.rules.loss.loss_series import recent
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["FrozenTraining"]

_SIX_DIGITS = 1e-6
_SLOWLY = 20  # values before the loss stood still that say whether it got there little by little
_NO_SMALL_SHARE = 0.01  # of the first loss
_UPDATE, _NORM = "update/ratio", "grad/norm"


@dataclass(frozen=True, kw_only=True)
class FrozenTraining(Rule):
    """The update-to-weight ratio is measured on a sample of the parameters that have gradients. The learning rate is
    that of the first parameter group, so a measurement that says that weights moved outweighs it; where it decayed to
    zero, 5 % of the run are left to it, because schedules end so.

    Weights that stand still do not make the loss of different batches the same. So a constant loss is a warning only
    after it varied, or with a gradient norm of zero; it is a remark while weights are known to move (the script logs
    a constant), at exactly zero, after it came to its value little by little (a training on one batch that
    converged), and, after constant_steps, if it never varied at all. A warm-up that begins at zero leaves it after a
    step; so nothing shorter counts. A loss that is zero at once, from no small share of its first value, and has no
    gradient, did not converge: nothing enters it any more, though weight decay may still move weights.
    """

    update_steps: int = 50
    observations: int = within(4, least=1, most=16)
    lr_steps: int = 100
    equal_steps: int = 100
    constant_steps: int = 500

    id: ClassVar[str] = "frozen_training"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("grad_vanishing",)
    reads = (
        Series(LOSS, keep=160, judged=True), Series(_UPDATE, keep=16, judged=True), Series("lr", merge="max", judged=True),
        Series(_NORM, merge="max"), Series("amp/skipped", merge="max"),
    )  # fmt: skip
    charts = (_UPDATE, LOSS)
    life = Life(clear_steps=2, restated=True)
    state_version = 2

    def judge(self, window: Window) -> Finding | Unknown | None:
        # still, still_since: how many values of the loss were the same, and from which step on, of how many seen; varied:
        # whether it was another before; fell_from: the level from which it fell to zero at once; zero: see zero_rate
        fresh = {
            "still": 0, "still_since": 0, "value": None, "varied": False, "seen": 0, "loss_step": -1,
            "fell_from": None, "zero": dict(zero_rate.FRESH),
        }  # fmt: skip
        state = window.state_of(self, fresh)
        rates = window.series("lr")
        if rates is not None and rates.step is not None and rates.value is not None:
            zero_rate.follow(state["zero"], rates.value, rates.step)
        track = window.series(window.loss_name or LOSS)
        if track is not None:
            self._follow_loss(window, track, state)
        if state["fell_from"] is not None and state["still"] >= self.equal_steps and window.value(_NORM) == 0:
            figures = {"values": state["still"], "level": state["fell_from"]}
            return self._found(window, "warning", "zero at once", state["still_since"], **figures)
        unmoved = self._unmoved_since(window)
        if unmoved is not None:
            return self._unmoved(window, unmoved)
        if zero_rate.stays_zero(window, state["zero"], self.lr_steps):
            return self._found(window, "warning", "learning rate", state["zero"]["since"])
        if track is not None and state["still"] >= self.equal_steps:
            return self._same_loss(window, track, state)
        # where the state was lost with the server's, it must first see anew that something moves
        is_new = window.is_firing(self.id) and state["seen"] < self.equal_steps
        return UNKNOWN if is_new and not self._moved_after(window, -1) else None

    # --- what is followed ---------------------------------------------------------------------------------------------

    def _follow_loss(self, window: Window, track: StepSeries, state: dict[str, Any]) -> None:
        value, step = track.value, track.step
        if value is None or step == state["loss_step"] or not math.isfinite(value):
            return
        state["loss_step"] = step
        state["seen"] += 1
        known = state["value"]
        if known is not None and abs(value - known) <= _SIX_DIGITS / 2 * abs(known):
            state["still"] += 1
        else:
            level = None if value else _fell_from(track.last(_SLOWLY + 1)[:-1], window.loss_before or window.first_loss)
            state.update(value=value, still=1, still_since=step, varied=known is not None, fell_from=level)

    def _unmoved_since(self, window: Window) -> int | None:
        """Since which step every measurement says that no weight moved; None if one says otherwise, or too few came."""
        ratios = window.series(_UPDATE)
        if ratios is None or ratios.value != 0:
            return None
        rows = zip(reversed(ratios.last(ratios.size)), reversed(ratios.last_steps(ratios.size)), strict=True)
        steps = [step for _, step in itertools.takewhile(lambda row: row[0] == 0, rows)]
        enough = len(steps) >= self.observations and steps[0] - steps[-1] >= self.update_steps
        return steps[-1] if enough else None

    def _moved_after(self, window: Window, step: int) -> bool:
        """Whether a measurement after this step says that weights moved."""
        ratios = window.series(_UPDATE)
        return ratios is not None and ratios.value != 0 and (ratios.step or 0) > step

    # --- what is found ------------------------------------------------------------------------------------------------

    def _unmoved(self, window: Window, since: int) -> Finding:
        norm, rate = window.value(_NORM), window.value("lr")
        skipped = window.series("amp/skipped")
        cause = ""
        if rate == 0:
            cause = "learning rate"
        elif norm == 0:
            cause = "no gradients"
        elif skipped is not None and _rises(skipped.last(8)):
            cause = "skipped steps"
        return self._found(window, "warning", cause, since, update_ratio=0.0)

    def _same_loss(self, window: Window, track: StepSeries, state: dict[str, Any]) -> Finding | None:
        since, value = state["still_since"], state["value"]
        before = [one for one, step in zip(track.values, track.steps, strict=True) if step < since]
        if self._moved_after(window, since):
            why = "moves"
        elif value == 0:
            why = "zero"
        elif _came_slowly(before[-_SLOWLY:], value):
            why = "converged"
        elif window.value(_NORM) == 0:
            why = "no gradient"
        elif state["varied"]:
            why = "froze"
        elif state["still"] < self.constant_steps:
            return None
        else:
            why = "constant"
        is_ill = why in ("no gradient", "froze")
        return self._found(
            window, "warning" if is_ill else "info", "same loss" if is_ill else "constant loss", since,
            loss=value, values=state["still"], why=why,
        )  # fmt: skip

    def _found(self, window: Window, severity: Severity, cause: str, since: int, **evidence: Any) -> Finding:
        return self.found(
            severity, cause=cause, since_step=since,
            evidence={
                **recent(window), "step": window.at, "since_step": since, "over_steps": window.at - since,
                "grad_norm": window.value(_NORM), "update_ratio": window.value(_UPDATE), **evidence,
            },
        )  # fmt: skip


def _fell_from(before: list[float], first: float | None) -> float | None:
    """The level before a value of zero, if it is no small share of the first value and the loss came no nearer to zero."""
    level = median(before) if len(before) == _SLOWLY and first is not None else 0.0
    return level if 2 * min(before, default=0.0) >= level >= _NO_SMALL_SHARE * (first or math.inf) > 0 else None


def _rises(values: Sequence[float]) -> bool:
    return len(values) > 1 and all(a < b for a, b in itertools.pairwise(values))


def _came_slowly(before: Sequence[float], value: float) -> bool:
    """Whether the values before got nearer and nearer to this one, without a jump at the end."""
    distances = [abs(one - value) for one in before if math.isfinite(one)]
    if len(distances) < _SLOWLY:
        return False
    return all(a >= b for a, b in itertools.pairwise(distances)) and distances[-1] <= 1e-4 * abs(value)
