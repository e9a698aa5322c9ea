"""overfit: the loss of the evaluation rises while that of the training falls, or never was below the first one."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from statistics import fmean, median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.loss.loss_series import recent
from perfagent_server.rules.rule import EVALUATION_LOSS, UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.window import Window

__all__ = ["Overfit"]

_TRAINED = 200  # newest values of the training loss that may stand for it at an evaluation
_FEWEST = 20  # of them, where evaluations are close to each other
_KEPT = 32  # evaluations, or means of 2, 4, 8 ... neighbours
_BEYOND_CHANCE = 1.5  # deviations above the mean that three in a row, rising, hardly ever have by chance


@dataclass(frozen=True, kw_only=True)
class Overfit(Rule):
    """The training loss at an evaluation is the median of the values since the evaluation before, 20 to 200 of them. A
    gap alone (augmentation, dropout) is no overfitting, and neither is an evaluation that rises together with the
    training loss (a warm restart, other data). The gap and patience are SageMaker Debugger's (ratio 0.1), with three
    evaluations for its one. A loss that is not positive is measured by how far it had come down.

    Of many noisy evaluations the lowest is far below the others by chance alone: of n normal values by sqrt(2 ln n)
    deviations. The rise must be more than that, and hundreds are judged by means of 2, 4, 8 ... neighbours.

    An evaluation that never was below the first loss of the training, when learned_share of that is left in training,
    learned nothing of what training did: BatchNorm in evaluation mode, or other data. Where it only has other units (a
    sum), the two keep their ratio; it must have grown by apart_times since the first evaluation.
    """

    evaluations: int = within(3, least=1, most=_KEPT // 2 - 1)
    risen_pct: float = within(3.0, most=10_000)
    gap_pct: float = within(10.0, most=10_000)
    noise_times: float = 3.0
    learned_share: float = 0.1
    apart_times: float = 4.0
    clear_at: float = 0.8  # of what it takes to fire

    id: ClassVar[str] = "overfit"
    severities = ("warning",)
    question = Question.DOES_IT_LEARN
    after = ("update_ratio",)
    reads = (Series(EVALUATION_LOSS, keep=_KEPT, judged=True), Series(LOSS, keep=_TRAINED), Series("lr", merge="max"))
    charts = (LOSS,)
    life = Life(restated=True)
    state_version = 4

    def judge(self, window: Window) -> Finding | Unknown | None:
        evaluated = window.series(EVALUATION_LOSS)
        if evaluated is None or evaluated.value is None or evaluated.step is None:
            return None
        if not math.isfinite(evaluated.value):
            return UNKNOWN
        # rows: [step, evaluation, training], each the mean of `width` evaluations; newest: those of the next row;
        # waiting: evaluations for which no training loss has come yet
        state = window.state_of(self, {"rows": [], "newest": [], "width": 1, "first": None, "waiting": []})
        rows, newest, waiting = state["rows"], state["newest"], state["waiting"]
        if any(evaluated.step <= known[-1][0] for known in (waiting, newest or rows) if known):
            return UNKNOWN
        waiting.append([evaluated.step, evaluated.value])
        del waiting[:-_KEPT]
        while waiting:
            trained = self._trained(window, waiting[0][0], since=(newest or rows or [[0]])[-1][0])
            if trained is None:
                return UNKNOWN
            self._take(state, [*waiting.pop(0), trained])
        if (newest and not window.is_firing(self.id)) or len(rows) <= self.evaluations:
            return UNKNOWN
        return self._never_good(window, state) or self._judge(window, state)

    def _take(self, state: dict[str, Any], evaluation: list[Any]) -> None:
        rows, newest = state["rows"], state["newest"]
        state["first"] = state["first"] or evaluation
        newest.append(evaluation)
        if len(newest) == state["width"]:
            rows.append(_mean(newest))
            newest.clear()
        if len(rows) == _KEPT:
            rows[:] = [_mean(rows[at : at + 2]) for at in range(0, _KEPT, 2)]
            state["width"] *= 2

    def _judge(self, window: Window, state: dict[str, Any]) -> Finding | None:
        rows = state["rows"]
        best_step, best, best_trained = min(rows, key=itemgetter(1))
        newest, is_firing = rows[-self.evaluations :], window.is_firing(self.id)
        now, trained = newest[-1][1], newest[-1][2]
        scale = best if best > 0 else state["first"][1] - best
        noise_times = max(self.noise_times, _BEYOND_CHANCE + math.sqrt(2 * math.log(len(rows))))
        needed = max(self.risen_pct / 100 * scale, noise_times * _noise([row[1] for row in rows]))
        risen = sorted(row[1] - best for row in newest)
        if is_firing:  # it goes on until most of the newest evaluations are nearly as good as the best one
            is_up = risen[len(risen) // 2] >= self.clear_at * needed
        else:
            is_up = risen[0] >= needed and newest[0][0] > best_step and now >= newest[0][1]
        if scale <= 0 or not is_up or trained >= best_trained or now - trained < self.gap_pct / 100 * abs(trained):
            return None
        return self._finding(
            window, rows, "", best_step, best_step=best_step, best=best, training_at_best=best_trained,
            since_best=state["width"] * sum(1 for row in rows if row[0] > best_step),
            worse_pct=100 * (now - best) / best if best > 0 else None,
        )  # fmt: skip

    def _never_good(self, window: Window, state: dict[str, Any]) -> Finding | None:
        rows, (step, evaluated, trained_at) = state["rows"], state["first"]
        (_, now, trained), began = rows[-1], window.loss_before if window.start_step else window.first_loss
        best = min(row[1] for row in rows)
        if began is None or not 0 < trained <= self.learned_share * began or min(evaluated, trained_at) <= 0:
            return None
        if best < began or now * trained_at < self.apart_times * evaluated * trained:
            return None
        return self._finding(window, rows, "never good", step, best=best, began=began)

    def _finding(self, window: Window, rows: list[list[float]], cause: str, since: int, **figures: Any) -> Finding:
        step, evaluation, training = rows[-1]
        figures |= {
            "step": step,
            "evaluation": evaluation,
            "training": training,
            "evaluations": [row[:2] for row in rows],
        }
        return self.found("warning", cause=cause, since_step=since, evidence={**recent(window), **figures})

    def _trained(self, window: Window, step: int, since: int) -> float | None:
        """The training loss at an evaluation; since: step of the one before. Scripts may count evaluations by epochs: a
        step before all that are kept says nothing, and then the newest values count."""
        track = window.series(window.loss_name or LOSS)
        if track is None:
            return None
        steps = track.steps_before(step, _TRAINED)
        near = len(steps) - bisect_right(steps, since)
        values = track.before(step, max(near, _FEWEST)) if step >= track.steps[0] else track.last(_TRAINED)
        known = [value for value in values if math.isfinite(value)]
        return median(known) if known else None


def _mean(rows: list[list[float]]) -> list[float]:
    """One row of several: the step of the last, the means of both losses."""
    return [rows[-1][0], fmean(row[1] for row in rows), fmean(row[2] for row in rows)]


def _noise(values: list[float]) -> float:
    """How much evaluations vary from one to the next, beside their trend: the second differences see none in a line."""
    bends = [abs(c - 2 * b + a) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return 0.6 * median(bends) if len(bends) >= 3 else 0.0  # of white noise with this deviation the median bend is 1.65
