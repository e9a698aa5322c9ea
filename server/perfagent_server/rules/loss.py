"""Rules on the loss: NaN, infinity and spikes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import LOSS, Finding, loss_kind
from perfagent_server.alerts.life import Life
from perfagent_server.diagnosis.remedies import GREW_REMEDY, REMEDIES
from perfagent_server.rules.window import Track, Window

__all__ = ["LossSpike", "NonfiniteLoss", "named_ranks", "surroundings", "was_skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteLoss:
    """The loss of a step is NaN or infinite on any rank: critical at once, without a warm-up.

    Loss is the series `loss`, and what by its name is the loss of the training as a whole: `train/loss`, `train_loss`,
    `loss/total` (`perfagent.wire.loss_kind`). That of an evaluation is not: it is NaN where there was nothing to
    average. A part of a loss (`loss/kl`, `g_loss`) counts where the run logs no whole one, and when it was finite and
    then is not for part_values of its values in a row: one that is computed in every tenth step is NaN in nine by
    design.

    excused_steps: a step that the GradScaler skipped (amp/skipped rose, or the scale fell, in that very step) changed
    no weight; that many of them in a row are no fault, one more is. A loss that rose by grown_times without a break
    before ran away:
    its remedy is another one.
    """

    excused_steps: int = 2
    part_values: int = 20
    grown_times: float = 1000.0

    id: ClassVar[str] = "nonfinite_loss"
    on: ClassVar[tuple[str, ...]] = (LOSS,)
    urgent: ClassVar[str] = "loss"
    life: ClassVar[Life] = Life(clear_steps=50, outlives_run=True)

    def judge(self, window: Window) -> Finding | None:
        bad = window.bad_at("loss", window.at)
        if bad is None:
            return None
        series = bad.leading
        since = window.at
        if series == LOSS:
            if skips_in_a_row(window, "loss", window.at, self.excused_steps) in range(1, self.excused_steps + 1):
                return None
        elif loss_kind(series) == "whole":
            if self._excused(window, series):
                return None
        else:
            stayed = self._stayed(window, series)
            if stayed is None:
                return None
            since = stayed
        spelled = "NaN" if math.isnan(bad.value) else ("+Inf" if bad.value > 0 else "-Inf")
        where = f" on {named_ranks(bad.ranks, window.world_size)}" if window.world_size > 1 else ""
        losses = window.tracks[series].before(since - 1, 50) if series in window.tracks else []
        finite = [value for value in losses if math.isfinite(value)]
        before = f"; the last finite value was {finite[-1]:.4g}" if finite else "; no finite value came before"
        grew = self._grew(finite)
        if grew is not None:
            count, lowest = grew
            before = f"; over the {count} values before it had grown from {lowest:.4g} to {finite[-1]:.4g}"
        return Finding(
            rule=self.id,
            severity="critical",
            message=f"{_named(series)} became {spelled} in step {since}{where}{before}.",
            since_step=since,
            ranks=list(bad.ranks),
            evidence={
                "step": since, "series": series, "value": bad.value, **surroundings(window), "last_losses": finite,
            },
            fix=REMEDIES[self.id] if grew is None else GREW_REMEDY,
        )  # fmt: skip

    def _grew(self, finite: list[float]) -> tuple[int, float] | None:
        """(over how many values, from what) the loss ran away before it was no number: the training diverged, which no
        bad sample does. None when it did not."""
        count = 1
        while count < len(finite) and finite[-count - 1] < finite[-count]:
            count += 1
        first = finite[-count] if finite else 0.0
        return (count, first) if finite and finite[-1] >= self.grown_times * abs(first) > 0 else None

    def _excused(self, window: Window, series: str) -> bool:
        """Whether the GradScaler skipped a step since the last finite value of a loss that the script logged. Scripts
        count from 0 or 1 and log every so many steps, so the skipped step is looked for from there to one step
        later."""
        track = window.tracks.get(series)
        if track is None:
            return False
        row = _bad_in_a_row(track.before(window.at, self.excused_steps + 1))
        places = range(len(track.steps) - 1, -1, -1)
        last = next(
            (track.steps[at] for at in places if track.steps[at] < window.at and math.isfinite(track.values[at])), None
        )
        after = window.at - 1 if last is None else last
        return row <= self.excused_steps and was_skipped(window, after + 1, later=window.at - after)

    def _stayed(self, window: Window, series: str) -> int | None:
        """Since which step a part of a loss is no number, when that is no habit of it; None otherwise."""
        track = window.tracks.get(series)
        if track is None or window.loss_name is not None:
            return None
        values = track.before(window.at, track.size)
        row = _bad_in_a_row(values)
        if row < self.part_values or (row == len(values) and not window.active(self.id)):
            return None
        steps = track.steps_before(window.at, row)
        return steps[0]


def _named(series: str) -> str:
    return "The loss" if series == LOSS else series


def _finite(track: Track) -> tuple[list[float], list[int]]:
    """The values that are kept and are numbers, and their steps. Not all that happens to be in memory: a restarted
    server has no more than track.size."""
    values, steps = track.last(track.size), track.last_steps(track.size)
    if math.isfinite(sum(values)):
        return values, steps
    places = [place for place, value in enumerate(values) if math.isfinite(value)]
    return [values[place] for place in places], [steps[place] for place in places]


def _bad_in_a_row(values: list[float]) -> int:
    """How many of the newest values are no numbers."""
    return next((count for count, value in enumerate(reversed(values)) if math.isfinite(value)), len(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    """The loss of the run (`loss`, else the whole loss that its script logs: Window.loss_name) jumped up and stayed
    there for some steps.

    The median of the last `short` steps is compared with a line through the `long` steps before (medians of its halves;
    only a falling line is followed, at half its slope, because a curve flattens). The distance must exceed z_at_least
    of the residuals' spread (IQR / 1.349, at least floor_pct of the level) and rise_pct of the level. Measured on 31
    real pre-training curves, on which the thresholds were also chosen (so in-sample; 7 of them are in
    tests/data/loss_curves):
    no alert in 119,501 steps; of 400 spikes of +0.5 nat that decay, at places not used for tuning, 97.8 % are found
    within 10 steps (65 of 73 before step 600), where a flat baseline with z > 3 finds 86.3 %: its spread is inflated,
    and its level raised, by the falling loss itself.

    A loss of its own kind has its own idea of what a jump is: the same statistic is taken over the last thousand steps,
    and the jump must be usual_times what is usual there (the 85th percentile), or unsteady_times it for a loss that
    changes its sign or whose spread is above unsteady_pct of its level (reinforcement learning, GANs); before there is
    history enough, such a loss must jump by early_unsteady_z of its spread, and by no more than early_unsteady_times
    its level: what was next to nothing (the loss of a value before the first reward) may rise to anything. A single
    step cannot move the median: blips stay silent.

    A jump that comes round (epochs that begin high, warm restarts whose learning rate is not logged) is told the first
    time and then usual: see _comes_round. Of 249 spikes put into real curves at equal distances, none was taken for
    such a turn.

    Known limits, runs flagged of 20 synthetic healthy ones: a loss that jumps up and stays or decays, with nothing else
    to tell it from a spike, fires (the first turn of a cycle 20, and every turn of one longer than a thousand logged
    steps; a curriculum of +0.3 steps 20); sparse bursts 9; slowly wandering noise 0 to 6.
    """

    short: int = 9
    long: int = 128
    z_at_least: float = 2.75
    rise_pct: float = 4.0
    floor_pct: float = 0.2
    warmup_steps: int = 200
    longest_lr_warmup_steps: int = 5000
    abrupt: float = 0.6
    usual_times: float = 5.0
    unsteady_pct: float = 8.0
    unsteady_times: float = 6.0
    unsteady_record: float = 2.0
    early_z: float = 3.0
    early_unsteady_z: float = 25.0
    early_unsteady_times: float = 100.0
    unsteady_history: int = 50
    lost_in_a_row: int = 2

    id: ClassVar[str] = "loss_spike"
    on: ClassVar[tuple[str, ...]] = ("loss",)
    urgent: ClassVar[str] = ""
    life: ClassVar[Life] = Life(clear_steps=30)

    def judge(self, window: Window) -> Finding | None:
        series = window.loss_name
        track = None if series is None else window.tracks.get(series)
        if series is None or track is None:
            return None
        if window.active(self.id):
            return self._judge_open(window, series, track)
        values = self._newest(track)
        if values is None:
            return None
        half = self.long // 2
        now = sorted(values[self.long :])[self.short // 2]
        near = sorted(values[self.long - half : self.long])[half // 2]
        rise = self.rise_pct / 100
        if not now - near > 0.5 * rise * abs(near):  # most steps end here
            return None
        if window.at < self._armed_at(window):
            return None
        distance, spread, level = self._measure(values)
        z = distance / spread
        if z < self.z_at_least or distance < rise * abs(level):
            return None
        just_before = sorted(values[self.long - 16 : self.long])[8]
        history, steps = _finite(track)
        if now - just_before < self.abrupt * distance or not self._unusual(history, distance, spread, level):
            return None
        if self._comes_round(history, steps, window.start_step, distance):
            return None
        above = f"{100 * distance / abs(level):.0f} % above" if level else "above"
        norms = window.track("grad/norm")
        return Finding(
            rule=self.id,
            severity="warning",
            message=(
                f"{_named(series)} jumped to {now:.4g} at step {window.at}, {above} the {level:.4g} expected from the "
                f"{self.long} steps before ({z:.1f} times their spread)."
            ),
            since_step=window.at,
            evidence={
                "step": window.at, "series": series, "loss": now, "expected": level, "spread": spread, "z": z,
                "window_steps": self.long, "last_losses": track.last(50), "lr": window.value("lr"),
                "grad_norms": norms.last(20) if norms else [],
            },
            fix=REMEDIES[self.id],
        )  # fmt: skip

    def _judge_open(self, window: Window, series: str, track: Track) -> Finding | None:
        """While its alert is open: whether the loss is still up. It is over when half the way back to where it was
        expected.

        The steps just before are no measure for that, because a loss that stays up is soon the usual one there. The
        jump is looked up among the steps that are kept instead; when it is no longer among them (after about a
        thousand), the new level is the level of this run, which the healthy verdict says. Values that are no numbers do
        not say that the loss came back.
        """
        newest = [value for value in track.last(self.short) if math.isfinite(value)]
        now = sorted(newest)[len(newest) // 2] if 2 * len(newest) > self.short else math.nan
        history, _ = _finite(track)
        if math.isfinite(now):
            jump = self._jump(history)
            if not (jump is not None and now >= jump[0] + 0.5 * jump[1]) and not self._still_jumps(window, history):
                return None
        return Finding(
            rule=self.id,
            severity="warning",
            message=f"{_named(series)} is not back from its jump.",
            since_step=window.at,
            evidence={"series": series, "loss": now},
            fix=REMEDIES[self.id],
        )

    def _still_jumps(self, window: Window, history: list[float]) -> bool:
        """Whether the newest steps would nearly raise the alert again: with a fifth less of all that it takes."""
        if len(history) < self.long + self.short or window.at < self._armed_at(window):
            return False
        distance, spread, level = self._measure(history[-self.long - self.short :])
        return distance >= 0.8 * self.z_at_least * spread and distance >= 0.8 * self.rise_pct / 100 * abs(level)

    def _jump(self, values: list[float]) -> tuple[float, float] | None:
        """(level expected before it, height) of the newest jump among these values: of its blocks of `short` the
        highest one."""
        need = self.long + self.short
        ends = range(len(values), self.short - 1, -self.short)
        middles = [sorted(values[end - self.short : end])[self.short // 2] for end in ends]
        near = self.long // 2 // self.short
        newest: int | None = None
        highest: tuple[float, float] | None = None
        for place, end in enumerate(ends):
            if end < need or (newest is not None and place > newest + near):
                break
            before = sorted(middles[place + 1 : place + 1 + near])[near // 2]
            if not middles[place] - before >= 0.5 * self.rise_pct / 100 * abs(before):
                continue
            distance, spread, level = self._measure(values[end - need : end])
            if distance < self.z_at_least * spread or distance < self.rise_pct / 100 * abs(level):
                continue
            newest = place if newest is None else newest
            if highest is None or distance > highest[1]:
                highest = (level, distance)
        return highest

    def _newest(self, track: Track) -> list[float] | None:
        """The newest long + short values. Up to lost_in_a_row values in a row that are no numbers are left out: steps
        that a GradScaler skipped, which say nothing about the others. None when the newest is none, or more in a row
        are none."""
        need = self.long + self.short
        values = track.last(need)
        if len(values) < need:
            return None
        if math.isfinite(sum(values)):
            return values
        kept: list[float] = []
        lost = 0 if math.isfinite(values[-1]) else self.lost_in_a_row
        for value in reversed(track.last(track.size)):
            lost = 0 if math.isfinite(value) else lost + 1
            if lost > self.lost_in_a_row:
                return None
            if not lost:
                kept.append(value)
                if len(kept) == need:
                    return kept[::-1]
        return None

    def _armed_at(self, window: Window) -> int:
        """The first step that is judged: after max(warm-up, learning-rate warm-up), and not soon after the rate was
        raised."""
        first = window.start_step + self.warmup_steps
        if window.lr_rise is not None:
            first = max(first, min(window.lr_rise, window.start_step + self.longest_lr_warmup_steps))
        return max(first, window.quiet_until)

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
        now = sorted(values[self.long :])[self.short // 2]
        return now - level, spread, level

    def _unusual(self, values: list[float], distance: float, spread: float, level: float) -> bool:
        """Whether such a distance is unusual for this very loss. Only asked when everything else says spike."""
        need = self.long + self.short
        past = [self._measure(values[end - need : end]) for end in range(len(values) - 2 * self.short, need - 1, -8)]
        typical = sorted(one[1] for one in past)[int(0.8 * len(past))] if past else spread
        unsteady = max(spread, typical) > self.unsteady_pct / 100 * abs(level) or min(values) < 0 < max(values)
        if unsteady and len(past) < self.unsteady_history:
            far = self.early_unsteady_z * spread <= distance <= self.early_unsteady_times * abs(level)
            return far and self._by_factors(values)
        if len(past) < self.unsteady_history and distance < self.early_z * spread:
            return False
        if not past:
            return True
        distances = sorted(one[0] for one in past)
        usual = distances[int(0.85 * (len(past) - 1))]
        if unsteady:
            if distance < self.unsteady_times * usual or distance < self.unsteady_record * distances[-1]:
                return False
            return self._by_factors(values)
        return distance > self.usual_times * usual

    def _by_factors(self, values: list[float]) -> bool:
        """Whether it is a jump by factors, too, which is how a positive value such as a temporal-difference loss
        varies."""
        if min(values) <= 0:
            return True
        ratio = self._measure([math.log(value) for value in values[-self.long - self.short :]])
        return ratio[0] >= self.z_at_least * ratio[1]

    def _comes_round(self, values: list[float], steps: list[int], start: int, distance: float) -> bool:
        """Whether this jump is the turn of a cycle: the run jumped so before, fell back slowly, and a whole number of
        such periods lies between its start and now. A spike decays or stays; it neither takes half the way to the next
        one to be half gone, nor keeps time. Only asked when everything else says spike."""
        wide, half = 2 * self.short, self.short // 2

        def middle(place: int, count: int) -> float:
            return sorted(values[place : place + count])[count // 2]

        def edge(first: int, end: int) -> int:
            """Where between two places the values jump."""
            return max(range(first, end), key=lambda place: middle(place, half) - middle(place - half, half))

        newest = edge(len(values) - wide, len(values) - half)
        jumps = {
            place: middle(place, self.short) - middle(place - wide, wide) for place in range(wide, newest - self.long)
        }
        largest = max(jumps.values(), default=0.0)
        if not largest > 0:
            return False
        last = max(place for place, height in jumps.items() if height >= 0.7 * largest)
        before = edge(max(wide, last - wide), last + self.short)
        height = middle(before, self.short) - middle(before - wide, wide)
        above, below = middle(before - wide, wide), middle(newest - wide, wide)  # the feet of the two jumps
        period = steps[newest] - steps[before]
        turns = round((steps[newest] - start) / period)
        return (
            0.5 * height <= distance <= 2 * height
            and turns >= 2
            and abs(steps[newest] - start - turns * period) <= 0.05 * period
            and below <= above + 0.25 * height
            and middle((before + newest) // 2 - half, self.short) >= 0.5 * (above + min(above, below)) + 0.25 * height
        )


def skips_in_a_row(window: Window, kind: str, step: int, enough: int) -> int:
    """How many non-finite steps up to this one, in a row, the GradScaler is known to have skipped; 0 when this one was
    not.

    Counts to enough + 1 at most.
    """
    count = 0
    while count <= enough and window.bad_at(kind, step) is not None and was_skipped(window, step, later=0):
        count += 1
        step -= 1
    return count


def was_skipped(window: Window, step: int, *, later: int) -> bool:
    """Whether the GradScaler skipped this step: its counter rose or its scale fell in this step, or up to `later` steps
    on."""
    for name, sign in (("amp/skipped", 1.0), ("amp/scale", -1.0)):
        track = window.tracks.get(name)
        if track is None:
            continue
        # Not `seen`: what came in the same frame counts, whatever the order of judging.
        places = [place for place, at in enumerate(track.steps) if step <= at <= step + later]
        for place in places:
            before = track.values[place - 1] if place else (0.0 if sign > 0 else track.values[place])
            if sign * (track.values[place] - before) > 0:
                return True
    return False


def surroundings(window: Window) -> dict[str, object]:
    """Learning rate, loss scale and gradient norms up to the step under judgement, as far as they are known."""

    def last(name: str, count: int) -> list[float]:
        track = window.tracks.get(name)
        return track.before(window.at, count) if track else []

    return {
        "lr": next(iter(last("lr", 1)), None),
        "scale": next(iter(last("amp/scale", 1)), None),
        "grad_norms": last("grad/norm", 20),
    }


def named_ranks(ranks: list[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return f"all {world_size} ranks"
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"{len(ranks)} of {world_size} ranks ({shown})"
