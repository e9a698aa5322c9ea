"""loss_spike: the loss jumped up and stayed there for some steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.evidence import surroundings
from perfagent_server.rules.loss.loss_series import finite, has_fallen, worth_telling
from perfagent_server.rules.rule import Life, Question, Rule, Series, within
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["LossSpike"]

_SETTLED = 1000  # steps
_FAR = 0.25  # a loss that fell to this share of its first value did not fall by chance, however noisy it is


@dataclass(frozen=True, kw_only=True)
class LossSpike(Rule):
    """The loss of the run (`loss`, else the whole loss that its script logs: Window.loss_name) jumped up and stayed
    there for some steps.

    The median of the last `short` steps is compared with a line through the `long` steps before (medians of its halves;
    only a falling line is followed, at half its slope, because a curve flattens). The distance must exceed z_at_least
    of the residuals' spread (IQR / 1.349, at least floor_pct of the level), rise_pct of the level, and 2 % of the way
    that the loss has come down (10 % where next to nothing is left of it: there any batch is a multiple of the level).
    Measured on 31 real pre-training curves of 11 families (7 are in tests/data/loss_curves): no alert in 119,501 steps.
    With the two thresholds chosen on one half of the families and tested on the other, 98 % of the spikes of +0.5 nat
    that decay, and 99 % of those that stay, are found within 10 steps, without an alert on the healthy curves; a flat
    baseline with z > 3 finds 86 %: its spread is inflated, and its level raised, by the falling loss itself.

    A loss of its own kind has its own idea of what a jump is: the same statistic is taken over the last thousand steps,
    and the jump must be usual_times what is usual there (the 85th percentile); unsteady_times it, and unsteady_record times
    the highest, for a loss that changes its sign or varies much (reinforcement learning, GANs). Before there is history
    enough, it must jump by so many spreads. A single step cannot move the median: blips stay silent.

    A loss that jumps up and stays or decays, with nothing else to tell it from a spike, fires (the first turns of a cycle
    whose rate is not logged; a curriculum in large steps). On healthy losses of all other kinds (tests/healthy_losses.py)
    it raised one alert in 1.5 million steps, and on small real trainings (GANs, PPO, DQN, VAEs, fine-tuning, restarts ...)
    one in 143,500.
    """

    short: int = within(9, least=1, most=100)
    long: int = within(128, least=32, most=1000)
    z_at_least: float = 2.5
    rise_pct: float = within(4.0, most=10_000)
    floor_pct: float = within(0.2, most=10_000)
    warmup_steps: int = 200
    longest_lr_warmup_steps: int = 5000
    abrupt: float = 0.6
    usual_times: float = 5.0
    unsteady_pct: float = within(8.0, most=10_000)
    unsteady_times: float = 10.0
    unsteady_record: float = 3.0
    early_unlearned_z: float = 8.0
    early_unsteady_z: float = 25.0
    unlearned_times: float = 100.0
    unsteady_history: int = 50

    id: ClassVar[str] = "loss_spike"
    severities = ("warning",)
    question = Question.DOES_IT_LEARN
    after = ("loss_divergence",)
    reads = (Series(LOSS, keep=1200, judged=True), Series("lr", merge="max"), Series("grad/norm", merge="max"))
    charts = (LOSS,)
    life = Life(clear_steps=30)
    state_version = 2
    joins = ("loss_divergence",)

    def judge(self, window: Window) -> Finding | None:
        series = window.loss_name
        track = None if series is None else window.by_step.get(series)
        if series is None or track is None:
            return None
        state = window.state_of(self, {"first": {}, "jump": None})
        if series not in state["first"]:
            state["first"][series] = next((value for value in track.values if math.isfinite(value)), math.nan)
        first: float = state["first"][series]
        if window.is_firing(self.id):
            return self._judge_open(window, series, track, state["jump"])
        values = self._newest(track)
        if values is None:
            return None
        half = self.long // 2
        now = _middle(values[self.long :])
        near = sorted(values[self.long - half : self.long])[half // 2]
        rise = self.rise_pct / 100
        if not now - near > 0.5 * rise * abs(near):  # most steps end here
            return None
        if window.at < self._armed_at(window):
            return None
        distance, spread, level = self._measure(values)
        z = distance / spread
        if z < self.z_at_least or distance < max(rise * abs(level), worth_telling(first, level)):
            return None
        just_before = sorted(values[self.long - 16 : self.long])[8]
        if now - just_before < self.abrupt * distance:
            return None
        if not self._unusual(finite(track), first, distance, spread, level):
            return None
        state["jump"] = {"from": level, "to": now, "at": track.total}
        return self.found(
            "warning",
            since_step=window.at,
            evidence={
                "step": window.at, "series": series, "loss": now, "expected": level, "spread": spread, "z": z,
                "above_pct": 100 * distance / abs(level) if level else None, "window_steps": self.long,
                "last_losses": track.last(50), **surroundings(window),
            },
        )  # fmt: skip

    def _judge_open(
        self, window: Window, series: str, track: StepSeries, jump: dict[str, Any] | None
    ) -> Finding | None:
        """While its alert is open: whether the loss is still up. It is over when half the way back to where it was
        expected; and after a thousand steps, for then this is the level of the run, which the healthy verdict says. Values
        that are not finite do not say that the loss came back."""
        newest = [value for value in track.last(self.short) if math.isfinite(value)]
        if 2 * len(newest) > self.short:
            now = _middle(newest)
            if jump is None or track.total - jump["at"] > _SETTLED:
                return None
            jump["to"] = max(jump["to"], now)
            if now < 0.5 * (jump["from"] + jump["to"]):
                return None
        else:
            now = math.nan
        evidence = {"series": series, "loss": now}
        return self.found("warning", cause="not back", since_step=window.at, evidence=evidence)

    def _newest(self, track: StepSeries) -> list[float] | None:
        """The newest long + short values, without those that are not finite: steps that a GradScaler skipped, which say
        nothing about the others. None when there are too few, or the newest is none."""
        need = self.long + self.short
        values = track.last(need)
        if len(values) < need or math.isfinite(sum(values)):
            return values if len(values) == need else None
        values = finite(track)[-need:] if math.isfinite(values[-1]) else []
        return values if len(values) == need else None

    def _armed_at(self, window: Window) -> int:
        """The first step that is judged: after max(warm-up, learning-rate warm-up), and not soon after the rate was
        raised."""
        first = window.start_step + self.warmup_steps
        if window.learning_rate.last_rise is not None:
            first = max(first, min(window.learning_rate.last_rise, window.start_step + self.longest_lr_warmup_steps))
        return max(first, window.learning_rate.quiet_until)

    def _measure(self, values: list[float]) -> tuple[float, float, float]:
        """(distance of the newest from the expected level, spread, expected level) of long + short finite values."""
        before = values[: self.long]
        half = self.long // 2
        slope = min(0.0, (sorted(before[half:])[half // 2] - sorted(before[:half])[half // 2]) / half)
        flat = sorted([value - slope * place for place, value in enumerate(before)])
        middle = 0.5 * (flat[half - 1] + flat[half])
        # the line at its last quarter: half the way from its middle to its end
        level = middle + slope * 0.75 * self.long
        quarter = self.long // 4
        spread = max((flat[3 * quarter] - flat[quarter]) / 1.349, self.floor_pct / 100 * abs(level), 1e-12)
        return _middle(values[self.long :]) - level, spread, level

    def _unusual(self, values: list[float], first: float, distance: float, spread: float, level: float) -> bool:
        """Whether such a distance is unusual for this very loss. Only asked when everything else says spike."""
        need = self.long + self.short
        past = [self._measure(values[end - need : end]) for end in range(len(values) - 2 * self.short, need - 1, -8)]
        typical = sorted(one[1] for one in past)[int(0.8 * len(past))] if past else spread
        unsteady = max(spread, typical) > self.unsteady_pct / 100 * abs(level) or min(values) < 0 < max(values)
        is_early = len(past) < self.unsteady_history
        if unsteady and not has_fallen(first, level, to=_FAR) and distance > self.unlearned_times * abs(level):
            return False
        if unsteady and is_early:
            return distance >= self.early_unsteady_z * spread and self._by_factors(values)
        if is_early and not has_fallen(first, level) and distance < self.early_unlearned_z * spread:
            return False
        distances = sorted(one[0] for one in past) or [0.0]
        usual = distances[int(0.85 * (len(distances) - 1))]
        if not unsteady:
            return distance > self.usual_times * usual
        return distance >= max(self.unsteady_times * usual, self.unsteady_record * distances[-1]) and self._by_factors(
            values
        )

    def _by_factors(self, values: list[float]) -> bool:
        """Whether it is a jump by factors, too, which is how a positive value such as a temporal-difference loss
        varies."""
        if min(values) <= 0:
            return True
        ratio = self._measure([math.log(value) for value in values[-self.long - self.short :]])
        return ratio[0] >= self.z_at_least * ratio[1]


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]
