"""loss_divergence: the loss rises again after it fell, or diverges from the start."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.evidence import surroundings
from perfagent_server.rules.loss import backstop
from perfagent_server.rules.loss.loss_series import has_fallen, is_cross_entropy, worth_telling
from perfagent_server.rules.loss.smoothed_loss import Lowest, SmoothedLoss
from perfagent_server.rules.rule import UNKNOWN, Events, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["LossDivergence"]

_BLOCKS = 20  # lowest points that are kept: of about a thousand values; while the alert is open five times as many
_SAME_RATE = 0.8  # a lowest point counts if the learning rate was at least this share of today's
_RUN = 30  # values that say whether an early loss still grows
_FEWEST = 20  # values that say what the loss is now
_TINY = 0.1  # a loss that begins below it (a value before the first reward, a critic) may grow by any factor


@dataclass(frozen=True, kw_only=True)
class LossDivergence(Rule):
    """The smoothed loss is above its lowest point of the last thousand steps by all of: warning_pct; `spreads` of its
    noise; usual_times of what it usually rose by in this run (95th percentile; of a settled loss at most what it came back
    from: no rise is usual because it takes long); and a share of what it had come down. Only lowest points at a learning
    rate like today's count, so a warm restart is no divergence; where the rate rose to a new peak since, it takes
    raised_times as much. A loss that is on its way back is silent.

    A loss that had not settled (come down by a quarter, ever more slowly, or kept steady) must rise by as much above where
    it came down from: those of GANs and of reinforcement learning swing. Before it is known what is usual (600 values before
    the rise), it is not judged at all, and the noise of a settled one stands for that.

    In the first warmup_steps a loss that runs away is judged by itself: all values after the first are lost_times as high,
    or it grows through the newest 30 values, to as much (in a loss that hardly jumps from step to step half of that, in
    logarithms, is enough), or a cross entropy was as high and these 30 are still 3.2 times its first value. Later the
    backstop (backstop.py) tells of a cross entropy lost_times its best, whatever its schedule; of any other loss ten times
    higher.

    Measured on 31 real pre-training curves of 11 families (119,501 steps): no alert; their smoothed loss never rose by more
    than 1.9 %. On made-up losses (tests/healthy_losses.py, seeds 6 to 29 of the seven hardest kinds, 504,000 steps) it
    raised three, all on temporal differences that wander by factors. A ramp of 0.5 nat over 300 steps, at a random place
    after step 400, is found in at least 95 % of the cases before it ends.
    """

    warning_pct: float = within(6.0, most=10_000)
    critical_pct: float = within(8.0, most=10_000)
    held_steps: int = 25
    warmup_steps: int = 200
    raised_times: float = 3.0
    spreads: float = 1.4
    usual_times: float = 3.0
    lost_times: float = 10.0

    id: ClassVar[str] = "loss_divergence"
    severities = ("warning", "critical")
    question = Question.DOES_IT_LEARN
    after = ("grad_norm_explosion",)
    reads = (
        Series(LOSS, keep=64, judged=True),
        Series("lr", merge="max"),
        Series("grad/norm", merge="max"),
        Events("loss", keep=1),
    )
    charts = (LOSS,)
    life = Life(clear_steps=25, restated=True)
    state_version = 3

    def judge(self, window: Window) -> Finding | Unknown | None:
        series = window.loss_name
        track = None if series is None else window.by_step.get(series)
        value = None if track is None else track.value
        if series is None or track is None or value is None or not math.isfinite(value):
            return UNKNOWN  # NaN is another rule's, and says nothing about where the loss is
        state = window.state_of(self, _fresh(series))
        if state["series"] != series:
            state.update(_fresh(series))
        loss = SmoothedLoss(state["loss"])
        loss.take(value)
        is_young = loss.count <= self.warmup_steps
        lost = self._is_lost(window, track, state, value)
        found = self._run_away(window, track, loss, state) if is_young or state["above"] is not None else None
        found = found or self._turned(window, track, loss, state) or lost
        if found is None and is_young and window.is_firing(self.id) and not state["ran"]:
            return UNKNOWN  # its state was lost with the server's: it must learn anew where the loss was
        return found

    def lost_again(self, window: Window) -> Finding | None:
        """For the verdict of a run in which this rule is not sure: the loss is above its first values now. Losses that
        change their sign, or begin next to zero, are none that must fall; one that jumps about has to rise by more."""
        series = window.loss_name
        track = None if series is None else window.series(series)
        state = window.state_of(self, _fresh(series))
        if series is None or track is None or state["series"] != series or track.seen < _FEWEST:
            return None
        loss, known = SmoothedLoss(state["loss"]), [value for value in track.last(64) if math.isfinite(value)]
        if not loss.early or len(known) < _FEWEST or min(known) <= 0:
            return None
        first, now = median(loss.early[:5]), median(known[-9:])
        if first <= _TINY or now < first * min(1.1 * math.exp(12 * _jumps(known)), math.sqrt(self.lost_times)):
            return None
        lowest = loss.lowest(loss.blocks)
        low, step = (None, None) if lowest is None else (lowest["low"], lowest["step"])
        return self.found(
            "info",
            cause="above its start",
            since_step=window.start_step + 1 if step is None else step,
            evidence={"series": series, "loss": now, "first": first, "lowest": low, "lowest_step": step},
        )

    def _is_lost(self, window: Window, track: StepSeries, state: dict[str, Any], value: float) -> Finding | None:
        lost = backstop.follow(
            state["backstop"], value, window.at, window.value("lr"), self.lost_times, must_fall=is_cross_entropy(window)
        )
        if lost is None:
            return None
        return self._told(
            window, track, "far above its best", lost.step,
            {"loss": lost.level, "lowest": lost.best, "lowest_step": lost.step, "times": lost.level / lost.best},
        )  # fmt: skip

    # --- it turned round ----------------------------------------------------------------------------------------------

    def _turned(self, window: Window, track: StepSeries, loss: SmoothedLoss, state: dict[str, Any]) -> Finding | None:
        is_firing = window.is_firing(self.id)
        if window.at >= window.learning_rate.quiet_until:
            # while the alert is open, the lowest point before it stays in sight
            loss.note_lowest(
                window.at, window.value("lr"), window.learning_rate.peak, _BLOCKS * (5 if is_firing else 1)
            )
        share, lowest, is_raised = self._highest(window, loss)
        critical = self.critical_pct / self.warning_pct
        is_up = share >= (1 / critical if is_firing else 1.0)
        state["held"] = state["held"] + 1 if is_up else 0
        state["critical"] = state["critical"] + 1 if share >= critical else 0
        if lowest is None or not is_up:
            return None
        newest, low = median(value for value in track.last(9) if math.isfinite(value)), lowest["low"]
        comes_back = newest < loss.mean - 0.5 * lowest["spread"]  # as after a spike that decays
        if not is_firing and (state["held"] < self.held_steps or comes_back):
            return None
        return self._told(
            window, track, "the learning rate was raised" if is_raised else "", lowest["step"],
            {
                "loss": loss.mean, "lowest": low, "lowest_step": lowest["step"], "spread": lowest["spread"],
                "rise_pct": 100 * (loss.mean - low) / abs(low) if low else None, "lowest_lr": lowest["lr"],
            },
            is_critical=state["critical"] >= self.held_steps,
        )  # fmt: skip

    def _highest(self, window: Window, loss: SmoothedLoss) -> tuple[float, Lowest | None, bool]:
        """(how far the loss is up, as a share of what it takes; the lowest point in question; whether the rate was
        raised since) of the lowest point at a rate like today's, and of that before the rate rose to a new peak."""
        lr = window.value("lr")
        most: tuple[float, Lowest | None, bool] = (0.0, None, False)
        same = [one for one in loss.blocks if lr is None or one["lr"] is None or one["lr"] >= _SAME_RATE * lr]
        before = [one for one in loss.all_blocks if lr is not None and one["peak"] < _SAME_RATE * lr]
        for chosen, is_raised in ((same, False), (before, True)):
            lowest = loss.lowest(chosen)
            if lowest is None:
                continue
            rise = loss.mean - lowest["low"]
            if not is_raised and not window.is_firing(self.id):
                loss.note_rise(rise)
            if loss.count > self.warmup_steps and rise > 0.5 * self.warning_pct / 100 * abs(lowest["low"]):
                share = rise / self._needed(window, loss, lowest, is_raised=is_raised)
                most = max(most, (share, lowest, is_raised), key=lambda one: one[0])
        return most

    def _needed(self, window: Window, loss: SmoothedLoss, lowest: Lowest, *, is_raised: bool) -> float:
        """How far above this lowest point the loss is too high."""
        low, spread = lowest["low"], lowest["spread"]
        if loss.first <= _TINY and not has_fallen(loss.first, low, to=0.25):
            return math.inf
        has_settled = loss.has_settled(lowest)
        usual, is_known = loss.usual_rise(
            loss.count - lowest["count"], comes_back=has_settled and is_cross_entropy(window)
        )
        has_settled = has_settled or (is_known and usual <= 0.5 * self.warning_pct / 100 * low)  # it kept steady
        if not is_known:
            if low <= 0 or not has_settled:
                return math.inf
            usual = max(usual, 12 * spread * spread / low)
        swing = 0.0 if has_settled else loss.highest_before(lowest) - low
        relative = self.warning_pct / 100 * abs(low) * (self.raised_times if is_raised else 1.0)
        needed = max(relative, worth_telling(loss.first, low), self.spreads * spread, self.usual_times * usual, 1e-12)
        return swing + needed

    # --- it diverged from the start ------------------------------------------------------------------------------------

    def _run_away(self, window: Window, track: StepSeries, loss: SmoothedLoss, state: dict[str, Any]) -> Finding | None:
        now = median(value for value in track.last(9) if math.isfinite(value))
        if state["above"] is None and self._explodes(window, track, loss):
            state.update(above=2 * loss.first, ran=True)
        if state["above"] is None or now < state["above"]:
            state["above"] = None
            return None
        figures = {"loss": now, "first": loss.first}
        return self._told(window, track, "from the start", window.start_step + 1, figures, is_critical=True)

    def _explodes(self, window: Window, track: StepSeries, loss: SmoothedLoss) -> bool:
        first, early = loss.first, loss.early
        if first <= _TINY:
            return False
        if loss.count == len(early) and min(early[1:], default=0.0) >= self.lost_times * first:
            return loss.count == 16
        values = track.last(_RUN)
        stays_up = len(values) == _RUN and min(values) >= math.sqrt(self.lost_times) * first
        if stays_up and max(*early, *track.last(64)) >= self.lost_times * first and is_cross_entropy(window):
            return True
        if len(values) < _RUN or not 0 < min(values) <= max(values) < math.inf:
            return False
        levels = [median(values[place : place + 6]) for place in range(0, _RUN, 6)]
        grows = all(after > 1.05 * before for before, after in itertools.pairwise(levels))  # a jump grows twice at most
        times = self.lost_times ** min(1.0, 0.5 + 3 * _jumps(values))
        return grows and levels[-1] >= max(2 * levels[0], times * max(early))

    def _told(
        self, window: Window, track: StepSeries, cause: str, since_step: int, figures: dict[str, Any],
        *, is_critical: bool = False,
    ) -> Finding:  # fmt: skip
        return self.found(
            "critical" if is_critical else "warning",
            cause=cause,
            since_step=since_step,
            evidence={
                "step": window.at, "series": window.loss_name, **figures, "last_losses": track.last(50), **surroundings(window),
            },
        )  # fmt: skip


def _fresh(series: str | None) -> dict[str, Any]:
    """The rule's state. loss: SmoothedLoss; held, critical: for how many values it has been so high; ran: whether it ran
    away; above: what it must fall below then."""
    return {
        "backstop": backstop.fresh(), "series": series, "loss": {}, "held": 0, "critical": 0, "above": None, "ran": False,
    }  # fmt: skip


def _jumps(values: list[float]) -> float:
    """How far values above zero jump from one to the next, as a logarithm."""
    return median(abs(math.log(after / before)) for before, after in itertools.pairwise(values))
