"""data_bug: what the loader gives cannot be learned from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.data.batch_readings import reading_of, readings
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
        return (
            self._labels(window)
            or self._constant(window)
            or self._one_class(window)
            or (self._far(window) if took.total >= self.normal_steps else None)
        )

    def _held(self, window: Window, name: str, at_least: float) -> float | None:
        """The mean of the newest readings, if all of them are so high."""
        found = readings(window, name, self.readings)
        if len(found) < self.readings or min(found) < at_least:
            return None
        return sum(found) / len(found)

    def _labels(self, window: Window) -> Finding | None:
        share = self._held(window, "batch/ignored_pct", self.ignored_pct)
        if share is None:
            return None
        return self._finding(window, "no label counts", ignored_pct=share)

    def _constant(self, window: Window) -> Finding | None:
        share = self._held(window, "batch/constant_pct", self.constant_pct)
        if share is None:
            return None
        return self._finding(window, "all rows the same", constant_pct=share)

    def _one_class(self, window: Window) -> Finding | None:
        """Whole numbers beside the inputs are labels where the loss takes classes: else lengths, or anything."""
        told = [*window.events("loss")]
        if not told or told[-1].data.get("kind") != "cross_entropy":
            return None
        share = self._held(window, "batch/one_class_pct", self.one_class_pct)
        if share is None:
            return None
        return self._finding(window, "one class a batch", one_class_pct=share)

    def _far(self, window: Window) -> Finding | None:
        means = readings(window, "batch/input_mean", self.far_readings)
        spreads = readings(window, "batch/input_std", self.far_readings)
        if len(means) < self.far_readings or len(means) != len(spreads):
            return None
        pairs = list(zip(means, spreads, strict=True))
        if not all(spread > 0 and self._is_far(mean, spread) for mean, spread in pairs):
            return None
        mean, spread = sum(means) / len(means), sum(spreads) / len(spreads)
        return self._finding(window, "not normalized", input_mean=mean, input_std=spread, readings=len(means))

    def _is_far(self, mean: float, spread: float) -> bool:
        return abs(mean) >= min(self.far_spreads * spread, self.far_units)

    def _finding(self, window: Window, cause: str, **evidence: float) -> Finding:
        return self.found(
            "info" if cause == "not normalized" else "warning",
            cause=cause,
            since_step=window.step,
            evidence={**evidence, "step": window.step},
        )
