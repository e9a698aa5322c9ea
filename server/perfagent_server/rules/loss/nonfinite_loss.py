"""nonfinite_loss: the loss of a step is NaN or infinite."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import LOSS, Finding, loss_kind
from perfagent_server.rules.evidence import surroundings, where
from perfagent_server.rules.loss.loss_series import bad_in_a_row
from perfagent_server.rules.model import grad_scaler
from perfagent_server.rules.model.exploding import exploded
from perfagent_server.rules.model.grad_scaler import skips_in_a_row, was_skipped
from perfagent_server.rules.rule import Life, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["NonfiniteLoss"]


@dataclass(frozen=True, kw_only=True)
class NonfiniteLoss(Rule):
    """Critical at once, without a warm-up: an update with NaN spoils every weight that it reaches.

    `perfagent.wire.loss_kind` tells by the name of a series whether it is the loss of the training as a whole. That
    of an evaluation is never judged: it is NaN where there was nothing to average. A part of a loss counts where no
    whole one is logged, and only when it was finite before: one that is computed in every tenth step is NaN in nine
    by design.

    excused_steps: a step that the GradScaler skipped (amp/skipped rose, or the scale fell, in that very step) changed
    no weight; that many of them in a row are no fault, one more is, and dates it to the first. A loss that rose by
    grown_times without a break before diverged: its remedy is another one. Where a gradient was not finite before the
    loss was, in a step that was taken, and no finite loss came in between, it began in the step of that gradient, whose
    update spoilt the weights.
    """

    excused_steps: int = 2
    part_values: int = 20
    grown_times: float = 1000.0

    id: ClassVar[str] = "nonfinite_loss"
    severities = ("critical",)
    question = Question.ARE_ITS_NUMBERS_FINITE
    reads = (
        Series(LOSS, judged=True), Series("lr", merge="max"), Series("grad/norm", merge="max"), *grad_scaler.READS,
    )  # fmt: skip
    urgent = "loss"
    charts = (LOSS,)
    life = Life(clear_steps=50, outlives_run=True)

    def judge(self, window: Window) -> Finding | None:
        bad = window.nonfinite_at("loss", window.at)
        if bad is None:
            return None
        series, skips = bad.leading, 0
        since = window.at
        if series == LOSS:
            skips = skips_in_a_row(window, "loss", window.at, self.excused_steps)
            if 0 < skips <= self.excused_steps:
                return None
            since -= max(0, skips - 1)
        elif loss_kind(series) == "whole":
            if self._excused(window, series):
                return None
        else:
            stayed = self._stayed(window, series)
            if stayed is None:
                return None
            since = stayed
        losses = window.by_step[series].before(since - 1, 50) if series in window.by_step else []
        finite = [value for value in losses if math.isfinite(value)]
        grown_values, grown_from = self._grew(finite) or (None, None)
        norms = exploded(window, since)
        first = self._first(window, since)
        began = self._bad_gradient_before(window, series, first)
        if began is not None:
            since = first
        cause = "the loss grew before" if grown_values else "the gradient grew before" if norms else ""
        return self.found(
            "critical",
            cause=cause or ("steps skipped" if skips and began is None else ""),
            since_step=since if began is None else began,
            ranks=list(bad.ranks),
            evidence={
                "step": since, "series": series, "value": bad.value, "last_finite": finite[-1] if finite else None,
                "grown_values": grown_values, "grown_from": grown_from, "gradient_step": began, "began_step": began,
                **norms, **where(window, bad.ranks), **surroundings(window), "last_losses": finite,
            },
        )  # fmt: skip

    def _first(self, window: Window, since: int) -> int:
        """The first bad step of the trouble that this one belongs to: that of the open alert."""
        state = window.state_of(self, {"first": since})
        state["first"] = min(state["first"], since) if window.is_firing(self.id) else since
        return int(state["first"])

    @staticmethod
    def _bad_gradient_before(window: Window, series: str, first: int) -> int | None:
        """The first step whose gradient was not finite, since the last finite loss before. A finite loss after it shows
        that its update did no harm; that of its own step was there before the update."""
        track = window.by_step.get(series)
        known = (
            [] if track is None else zip(track.steps_before(first - 1, 50), track.before(first - 1, 50), strict=True)
        )
        good = max((step for step, value in known if math.isfinite(value)), default=first - 1)
        steps = (entry.step for entry in window.nonfinite["gradient"].steps)
        return next((step for step in steps if good <= step < first and not was_skipped(window, step, later=1)), None)

    def _grew(self, finite: list[float]) -> tuple[int, float] | None:
        """(over how many values, from what) the loss grew before it was not finite: the training diverged, which no bad
        sample does. None when it did not."""
        count = 1
        while count < len(finite) and finite[-count - 1] < finite[-count]:
            count += 1
        first = finite[-count] if finite else 0.0
        return (count, first) if finite and finite[-1] >= self.grown_times * abs(first) > 0 else None

    def _excused(self, window: Window, series: str) -> bool:
        """Whether the GradScaler skipped a step since the last finite value of a loss that the script logged. Scripts
        count from 0 or 1 and log every so many steps, so the skipped step is looked for from there to one step
        later."""
        track = window.by_step.get(series)
        if track is None:
            return False
        row = bad_in_a_row(track.before(window.at, self.excused_steps + 1))
        places = range(len(track.steps) - 1, -1, -1)
        last = next(
            (track.steps[at] for at in places if track.steps[at] < window.at and math.isfinite(track.values[at])), None
        )
        after = window.at - 1 if last is None else last
        return row <= self.excused_steps and was_skipped(window, after + 1, later=window.at - after)

    def _stayed(self, window: Window, series: str) -> int | None:
        """Since which step a part of a loss is not finite, when that is no habit of it; None otherwise."""
        track = window.by_step.get(series)
        if track is None or window.loss_name is not None:
            return None
        values = track.before(window.at, track.size)
        row = bad_in_a_row(values)
        if row < self.part_values or (row == len(values) and not window.is_firing(self.id)):
            return None
        steps = track.steps_before(window.at, row)
        return steps[0]
