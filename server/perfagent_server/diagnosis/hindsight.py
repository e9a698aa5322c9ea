"""Findings that need the whole curve. Live rules need hundreds of values, but a trainer's log has one value every ten steps or
so.

The findings have the ids and words of the rules. This module makes allowance for data that files lack, such as the steps
that a GradScaler skipped, so the live rules stay strict."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median, stdev

from perfagent.wire import Finding
from perfagent_client.history.old_run import Samples
from perfagent_client.importing.attempts import loss_of
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.loss.loss_divergence import LossDivergence
from perfagent_server.rules.loss.loss_plateau import LossPlateau

__all__ = ["are_gradients_excused", "findings", "may_rise"]

_FEWEST = 12  # values that show a curve
_TINY = 0.1  # a loss that begins below it may grow by any factor
_LOST_TIMES, _STAYS_TIMES = 1.5, 1.2  # its start, at the end, and throughout the last half
_TURNED_TIMES, _OF_THE_FALL = 2.0, 0.3  # its best, and of what it had come down by
_EARLY_SHARE = 0.25
_GUESS_AMONG_A_MILLION = math.log(1e6)
_MOST_NATS = 100.0
_HIGH_NATS, _FLAT_PCT = 3.5, 4.0
_FEWEST_TO_FALL, _FIRST, _LITTLE = (
    40,
    10,
    0.02,
)  # values, those that say where it began, and the share of a fall that is none
_SWINGS = re.compile(
    r"reward|advantage|\bcritic|value_loss|policy|q_loss|td_loss|discriminator|generator|\b[dg]_loss|adversarial|entropy_loss|\bkl\b",
    re.IGNORECASE,
)
"""Series of reinforcement learning and of GANs, whose losses may rise in a healthy run."""
_MOST_BAD_SHARE, _AROUND = 0.25, 5


@dataclass(frozen=True, slots=True)
class _Curve:
    name: str
    steps: list[int]
    values: list[float]

    @property
    def level(self) -> float:
        """Where it is at its end."""
        return median(self.values[-max(5, len(self.values) // 10) :])


def findings(series: Mapping[str, Samples]) -> list[Finding]:
    """series: by the names that rules read."""
    name = loss_of(series)
    if name is None or may_rise(series):
        return []
    curve = _finite(name, series[name])
    if len(curve.values) < _FEWEST or min(curve.values) <= 0 or curve.values[0] <= _TINY:
        return []
    return [*_diverged(curve, series.get("lr")), *_never_learned(curve), *_never_fell(curve)]


def may_rise(names: Iterable[str]) -> bool:
    """Whether series of these names are of a training whose losses may rise."""
    return any(_SWINGS.search(name) for name in names)


def _finite(name: str, samples: Samples) -> _Curve:
    """The newest attempt."""
    begin = max((at for at, (a, b) in enumerate(pairwise(samples.step), 1) if b < a), default=0)
    kept = [
        (step, value)
        for step, value in zip(samples.step[begin:], samples.value[begin:], strict=True)
        if math.isfinite(value)
    ]
    return _Curve(name, [step for step, _ in kept], [value for _, value in kept])


def _diverged(curve: _Curve, rates: Samples | None) -> Iterator[Finding]:
    first, level, values = curve.values[0], curve.level, curve.values
    late = values[len(values) // 2 :]
    trebled = [median(values[max(0, at - 2) : at + 1]) for at in range(len(values))]
    best = min(range(len(values)), key=trebled.__getitem__)
    began = next((at for at, value in enumerate(values) if value >= _LOST_TIMES * first), len(values))
    figures: dict[str, object] = {"series": curve.name, "loss": level, "step": curve.steps[-1]}
    figures["lr"] = max(rates.value) if rates else None
    if level >= _LOST_TIMES * first and min(late) >= _STAYS_TIMES * first:
        cause = "from the start" if began <= _EARLY_SHARE * len(values) else "above its start"
        lowest = min(range(began + 1 if began < len(values) else len(values)), key=values.__getitem__)
        figures |= {
            "first": first,
            "lowest": values[lowest],
            "lowest_step": curve.steps[lowest],
            "highest": max(values),
        }
        yield _found(LossDivergence.id, "critical", cause, curve.steps[lowest], figures)
    elif (
        level >= _TURNED_TIMES * trebled[best]
        and min(values[-len(values) // 4 :]) >= _LOST_TIMES * trebled[best]
        and level - trebled[best] >= _OF_THE_FALL * (first - trebled[best])
    ):
        figures |= {"lowest": trebled[best], "lowest_step": curve.steps[best], "times": level / trebled[best]}
        yield _found(LossDivergence.id, "warning", "far above its best", curve.steps[best], figures)


def _never_learned(curve: _Curve) -> Iterator[Finding]:
    """A cross entropy that began worse than guessing among a million classes, and stands far above what a model knows."""
    first, half = curve.values[0], curve.values[len(curve.values) // 2 :]
    before, after = fmean(half[: len(half) // 2]), fmean(half[len(half) // 2 :])
    noise = stdev(half) / math.sqrt(len(half) / 2)
    is_flat = abs(before - after) <= _FLAT_PCT / 100 * after + noise
    if _GUESS_AMONG_A_MILLION <= first <= _MOST_NATS and is_flat and _HIGH_NATS <= curve.level <= first / 2:
        since = next(step for step, value in zip(curve.steps, curve.values, strict=True) if value <= 1.1 * curve.level)
        figures = {
            "series": curve.name,
            "first": first,
            "level": curve.level,
            "stands_since": since,
            "step": curve.steps[-1],
        }
        yield _found(LossPlateau.id, "warning", "worse than guessing", curve.steps[0], figures)


def _never_fell(curve: _Curve) -> Iterator[Finding]:
    """A remark: a model that was good before may stay where it is."""
    if len(curve.values) < _FEWEST_TO_FALL:
        return
    first, newest = fmean(curve.values[:_FIRST]), curve.values[-len(curve.values) // 3 :]
    now = fmean(newest)
    if -_LITTLE * first < first - now < max(_LITTLE * first, stdev(newest) / 2):
        figures = {"series": curve.name, "first": first, "mean": now, "values": len(newest), "step": curve.steps[-1]}
        yield _found(LossPlateau.id, "info", "never fell", curve.steps[0], figures)


def _found(rule: str, severity: str, cause: str, since: int, figures: dict[str, object]) -> Finding:
    found = next(one for one in all_rules() if one.id == rule)
    return found.found(severity, cause=cause, since_step=since, evidence=figures)  # type: ignore[arg-type]


def are_gradients_excused(series: Mapping[str, Samples]) -> bool:
    """Whether all gradients that were not finite may have been skipped by a GradScaler, of which the file does not say: few were
    so, and the loss after each is as it was before."""
    norms, name = series.get("grad/norm"), loss_of(series)
    if norms is None or name is None or "amp/scale" in series:
        return False
    bad = [step for step, value in zip(norms.step, norms.value, strict=True) if not math.isfinite(value)]
    curve = _finite(name, series[name])
    return 0 < len(bad) <= _MOST_BAD_SHARE * len(norms) and all(_goes_on(curve, step) for step in bad)


def _goes_on(curve: _Curve, step: int) -> bool:
    at = bisect_right(curve.steps, step)
    before, after = curve.values[max(0, at - _AROUND) : at], curve.values[at:]
    if not before or not any(after):
        return False
    limit = median(before) + 0.25 * abs(median(before))
    return median(after[:_AROUND]) <= limit and curve.level <= limit
