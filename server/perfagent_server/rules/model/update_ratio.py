"""update_ratio: a step changes the weights by far too much, or by next to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding, Severity
from perfagent_server.rules.model.layer_rows import LayerRow, layer_rows
from perfagent_server.rules.model.learning import is_flat, loss_left
from perfagent_server.rules.rule import UNKNOWN, Every, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["UpdateRatio"]

_TOTAL, _LAYERS = "update/ratio", "update_ratio/"
_CLIPPED_SCALED = "grad/clipped_scaled"
_KEEP = 4  # measurements


@dataclass(frozen=True, kw_only=True)
class UpdateRatio(Rule):
    """The limits for a layer are those of SageMaker Debugger's WeightUpdateRatio (1e-8 to 10); around 1e-3 is usual. For
    the whole model, high_ratio is much, too. It is a remark, for the losses of a GAN stand still while it learns; a
    warning takes a loss that still has learned_share of the first and keeps to its level, and besides a ratio of
    sick_ratio, a loss above the first one, or units that died. The first skip_steps do not count, for weights that
    begin at zero (LoRA's B, the last layer of a residual block) move by multiples of themselves at first; but where
    gradients are measured rarely, a high ratio in step 6 or later explains a loss that stands where it began 200
    steps later. Weights that stand still altogether are another rule's, and below least_rate of the highest learning
    rate small changes are meant. Where gradients were clipped with the loss scale still on them, small_clipped is small:
    such clipping leaves a norm of 1e-5 or so, unless the optimizer scales its steps itself.
    """

    large: float = 10.0
    small: float = 1e-8
    small_clipped: float = 1e-4
    high_ratio: float = 0.05
    sick_ratio: float = 0.3
    risen_share: float = 1.05
    observations: int = within(2, least=1, most=_KEEP)
    skip_steps: int = 100
    first_steps: int = 5
    learned_share: float = 0.7
    least_rate: float = 0.01  # of the highest learning rate: below it small changes are meant
    clear_at: float = 0.8

    id: ClassVar[str] = "update_ratio"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("lr_anomaly",)
    reads = (
        Series(_TOTAL, keep=_KEEP, judged=True),
        Series(_LAYERS, keep=_KEEP, judged=True),
        Series("lr", merge="max"),
        Series(_CLIPPED_SCALED, merge="max"),
        Series(LOSS),
        Every(10.0),
    )
    charts = (_TOTAL,)
    life = Life(clear_steps=1, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        total = window.series(_TOTAL)
        if total is None and _LAYERS not in window.by_family:
            return None
        state = window.state_of(self, {"first_loss": None})
        left = loss_left(window, state)
        began = window.start_step
        whole = None if total is None else _row(total, began + self.skip_steps)
        rows = layer_rows(window, _LAYERS, began + self.skip_steps)
        lowered = self.clear_at if window.is_firing(self.id) else 1.0
        if whole is not None and self._is_large(whole, lowered):
            return self._of_model(window, whole, "", left, is_sick=True)
        large = [row for row in rows if self._is_large(row, lowered)]
        if large:
            return self._of_layers(window, large, len(rows), "one layer")
        early = None if total is None else _row(total, began + self.first_steps)
        if early is not None and early.values[-1] >= lowered * self.high_ratio:
            stuck = left is not None and left > self.learned_share and is_flat(window)
            if whole is not None or (stuck and window.step - began >= 2 * self.skip_steps):
                is_sick = stuck and self._is_harmful(window, early.values[-1], left, lowered)
                return self._of_model(window, early, "", left, is_sick=is_sick)
        return self._small(window, whole, rows, left, lowered) if rows or whole is not None else UNKNOWN

    def _is_harmful(self, window: Window, ratio: float, left: float | None, lowered: float) -> bool:
        """Whether something besides a loss that stands still says that such steps are too large."""
        has_risen = left is not None and left > self.risen_share
        return ratio >= lowered * self.sick_ratio or has_risen or window.is_firing("dead_units")

    def _small(
        self, window: Window, whole: LayerRow | None, rows: list[LayerRow], left: float | None, lowered: float
    ) -> Finding | None:
        rate, highest = window.value("lr"), window.learning_rate.peak
        if rate is not None and rate < self.least_rate * highest:
            return None
        is_clipped = bool(window.value(_CLIPPED_SCALED))
        if whole is not None and self._is_small(whole, lowered, self.small_clipped if is_clipped else self.small):
            learns = is_clipped and left is not None and left <= self.learned_share  # as at a rate of 1e-6
            return self._of_model(window, whole, "clipped scaled" if is_clipped else "small", left, is_sick=not learns)
        small = [row for row in rows if self._is_small(row, lowered, self.small)]
        return self._of_layers(window, small, len(rows), "small layers") if small else None

    def _is_large(self, row: LayerRow, lowered: float) -> bool:
        newest = row.values[-self.observations :]
        return len(newest) == self.observations and lowered * self.large <= min(newest) < math.inf

    def _is_small(self, row: LayerRow, lowered: float, small: float) -> bool:
        newest = row.values[-self.observations :]
        return len(newest) == self.observations and min(newest) > 0 and max(newest) < small / lowered

    def _of_model(self, window: Window, whole: LayerRow, cause: str, left: float | None, *, is_sick: bool) -> Finding:
        figures = {"change_pct": 100 * whole.values[-1], "loss_left_pct": None if left is None else 100 * left}
        return self._finding(window, "warning" if is_sick else "info", cause, whole, whole.steps[0], figures)

    def _of_layers(self, window: Window, rows: list[LayerRow], measured: int, cause: str) -> Finding:
        rows.sort(key=lambda row: row.values[-1], reverse=cause != "small layers")
        worst = rows[0]
        figures = {
            "layers": {row.layer: row.values[-1] for row in rows[:64]}, "layer": worst.layer, "count": len(rows),
            "measured": measured, "limit": self.small if cause == "small layers" else self.large,
            "measurements": self.observations,
        }  # fmt: skip
        return self._finding(window, "warning", cause, worst, worst.steps[-self.observations], figures)

    def _finding(
        self, window: Window, severity: Severity, cause: str, row: LayerRow, since_step: int, more: dict[str, Any]
    ) -> Finding:
        ratios = dict(zip(map(str, row.steps), row.values, strict=True))
        evidence = {**more, "ratio": row.values[-1], "ratios": ratios, "lr": window.value("lr"), "step": row.steps[-1]}
        return self.found(severity, cause=cause, since_step=since_step, evidence=evidence)


def _row(track: StepSeries, after: int) -> LayerRow | None:
    """The newest ratios of the whole model, of the steps after one."""
    kept = [
        (step, value)
        for step, value in zip(track.last_steps(_KEEP), track.last(_KEEP), strict=True)
        if step > after and math.isfinite(value)
    ]
    return LayerRow("", [step for step, _ in kept], [value for _, value in kept]) if kept else None
