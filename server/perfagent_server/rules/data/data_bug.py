"""data_bug: what the loader gives cannot be learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.loss.loss_series import is_cross_entropy
from perfagent_server.rules.rule import Events, Life, Question, Rule, Series, within
from perfagent_server.rules.window import Window

__all__ = ["DataBug"]

_SERIES = ("batch/ignored_pct", "batch/constant_pct", "batch/one_class_pct", "batch/input_mean", "batch/input_std")
_KEPT = 16


@dataclass(frozen=True, kw_only=True)
class DataBug(Rule):
    """No training survives these defects, but for the last: an input far from zero, which is only a remark. (SageMaker's
    CheckInputImages takes 0.2, which flags every picture whose pixels are simply divided by 255.) A single class
    counts only where the class changes from batch to batch: then the data is sorted, and never shuffled. Labels of
    which most are left out are usual (only answers count).
    """

    ignored_pct: float = 99.9
    constant_pct: float = 95.0
    one_class_pct: float = 95.0
    readings: int = within(2, least=1, most=_KEPT)
    least_steps: int = 20
    far_spreads: float = 3.0
    far_units: float = 10.0
    far_readings: int = within(5, least=1, most=_KEPT)
    normal_steps: int = 500

    id: ClassVar[str] = "data_bug"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("loss_spike",)
    reads = (
        *(reading_of(name, keep=_KEPT) for name in _SERIES), Series("step_time_s", merge="median"), Events("loss", keep=1),
    )  # fmt: skip
    charts = _SERIES
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        took = window.series("step_time_s")
        if took is None or took.total < self.least_steps:
            return None
        for share, least, cause, can_be in (
            ("ignored_pct", self.ignored_pct, "no label counts", True),
            ("constant_pct", self.constant_pct, "all rows the same", True),
            # whole numbers beside the inputs are labels where the loss takes classes: else lengths, or anything
            ("one_class_pct", self.one_class_pct, "one class a batch", is_cross_entropy(window)),
        ):
            found = readings(window, f"batch/{share}", self.readings)
            if can_be and len(found) == self.readings and min(found) >= least:
                return self._finding(window, cause, **{share: sum(found) / len(found)})
        return self._far(window) if took.total >= self.normal_steps else None

    def _far(self, window: Window) -> Finding | None:
        means = readings(window, "batch/input_mean", self.far_readings)
        spreads = readings(window, "batch/input_std", self.far_readings)
        if len(means) < self.far_readings or len(means) != len(spreads):
            return None
        pairs = list(zip(means, spreads, strict=True))
        if not all(
            spread > 0 and abs(mean) >= min(self.far_spreads * spread, self.far_units) for mean, spread in pairs
        ):
            return None
        mean, spread = sum(means) / len(means), sum(spreads) / len(spreads)
        return self._finding(window, "not normalized", input_mean=mean, input_std=spread, readings=len(means))

    def _finding(self, window: Window, cause: str, **evidence: float) -> Finding:
        return self.found(
            "info" if cause == "not normalized" else "warning",
            cause=cause,
            since_step=window.step,
            evidence={**evidence, "step": window.step},
        )
