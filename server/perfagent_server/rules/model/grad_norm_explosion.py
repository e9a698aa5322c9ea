"""grad_norm_explosion: the gradient norm is many times what is usual, in more than one step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from perfagent.wire import LOSS, Finding
from perfagent_server.rules.evidence import surroundings
from perfagent_server.rules.model.learning import is_restless
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["GradNormExplosion"]

_NORM, _LAYERS = "grad/norm", "grad_norm/"
_KEEP = 160
_LEVEL_EVERY = 16  # observations after which the level of the quick look is taken anew
_MOST_SCALES = 64
_MOST_TOGETHER = 12
_MOST_RAISED = 64  # high norms that are remembered
_LATELY = 32  # measurements that a rise may take
_SETTLED = 1000  # measurements after which a rise that lasts is the level of this run
_NAMED = 5  # layers that the evidence names
_MUCH = 5.0  # times, by which one layer stands out


@dataclass(frozen=True, kw_only=True)
class GradNormExplosion(Rule):
    """Of the newest three norms two are far above the median of the `history` measured steps before: by warning_times, and
    by `spreads` of what is usual (IQR / 1.349 of the logarithms), in their geometric mean, in which one norm counts no more
    than critical_times. Steps are counted as they are measured, for many runs measure gradients now and then only.

    A single step cannot do it: clipping catches those, and healthy runs have them (of 19,560 steps of a GPT-2 run, single
    norms reach 7.5 times the median, but the second highest of three never more than 1.9 times). Two are enough where high
    norms are rare; where they are not, as many as do not come together by chance (_enough), so a rise that comes again and
    again is told once.

    It takes doubt_times as much while the learning rate rises; and that factor again in the first `history` norms, and where the
    loss is as restless as in reinforcement learning, and more than ever before in the run. A run whose norms had become next
    to nothing (a solved problem, a reward that is never met) must exceed what it once had. Norms that follow a loss scale
    are judged as multiples of it.
    """

    warning_times: float = 5.0
    critical_times: float = 10.0  # of the lowest of them
    spreads: float = 5.0
    by_chance: float = 3e-6  # how often high norms may come together by chance
    history: int = within(128, least=16, most=_KEEP)
    doubt_times: float = 2.0
    faded_share: float = 1e-3

    id: ClassVar[str] = "grad_norm_explosion"
    severities = ("warning", "critical")
    question = Question.DOES_IT_LEARN
    after = ("loss_scale_collapse",)
    reads = (
        Series(_NORM, keep=_KEEP, merge="max", judged=True),
        Series("grad/local_square_sum", keep=_KEEP, merge="root of sum", part_of=_NORM),
        Series("lr", merge="max"),
        Series(LOSS),
        Series("amp/scale", merge="min"),
        Series(_LAYERS, keep=8),
    )
    charts = (_NORM,)
    life = Life(clear_steps=16)
    state_version = 2

    def judge(self, window: Window) -> Finding | Unknown | None:
        track = window.by_step[_NORM]
        state = window.state_of(self, _fresh())
        scale = window.by_step.get("amp/scale")
        if scale is not None:
            _note_scale(state["scales"], window.at, scale)
        newest = track.last(3)
        if not math.isfinite(newest[-1]):
            return UNKNOWN  # a scaler skips such a step, and another rule reports it
        second = sorted(newest)[-2] if len(newest) == 3 and math.isfinite(sum(newest)) else None
        highest = state["highest"]
        if second is not None and second > highest:
            state["highest"] = second
        self._learn(track, state, newest[-1])
        if window.is_firing(self.id):
            return self._judge_open(track, window, state)
        if second is not None and (second <= 0 or second < self._much() * state["level"]):
            return None  # nearly every step ends here
        rise = self._rise(window, track, state, highest)
        if rise is None:
            return None
        state["usual"], state["fired"] = rise.level, track.total
        return self._finding(window, track, rise)

    def _much(self) -> float:
        """Half of what is told, in logarithms."""
        return math.sqrt(self.warning_times)

    def _learn(self, track: StepSeries, state: dict[str, Any], norm: float) -> None:
        """Takes a note of what this run is like."""
        if track.total >= state["taken"] + _LEVEL_EVERY:
            known = sorted(value for value in track.last(self.history) if 0 < value < math.inf)
            state["level"], state["taken"] = (known[len(known) // 2] if known else 0.0), track.total
        if norm > self._much() * state["level"] > 0:
            state["raised"].append([track.total, math.log(min(norm / state["level"], self.critical_times))])
            del state["raised"][:-_MOST_RAISED]

    def _rise(self, window: Window, track: StepSeries, state: dict[str, Any], highest: float) -> _Rise | None:
        """How far the newest norms are above the ones before; None if not far enough."""
        values, steps = _measured(track)
        early = len(values) < self.history + 3
        if len(values) < self.history // 4 + 3:
            return None
        history = max(self.history // 4, len(values) // 2) if early else self.history  # norms fall from large at first
        known = [values, _unscaled(values, steps, state["scales"])]
        rise = min((_Rise.of(one, steps, 2, history) for one in known), key=lambda one: one.lowest)
        count = self._enough(state["raised"], track.total, rise.lowest)
        if len(values) < self.history // 4 + count + 1:
            return None
        rise = min((_Rise.of(one, steps, count, history) for one in known), key=lambda one: one.lowest)
        restless = is_restless(window, rise.since - 1)
        limit = max(math.log(self.warning_times), self.spreads * rise.spread)
        limit += math.log(self.doubt_times) * (2 if early or restless else 1 if _is_rising(window) else 0)
        most = limit * math.log(self.critical_times) / math.log(self.warning_times)
        if sum(min(one, most) for one in rise.logs) < limit * count:
            return None
        lowest = math.exp(rise.lowest) * rise.level
        has_faded = rise.level < self.faded_share * highest and lowest <= self.warning_times * highest
        return None if has_faded or ((early or restless) and lowest <= highest) else rise

    def _enough(self, raised: list[list[float]], total: int, lowest: float) -> int:
        """How many norms of the newest must be high, of one more: as many as are that high together by chance less often
        than by_chance, as often as single ones were so far."""
        as_high = min(lowest, math.log(self.critical_times)) - 0.2
        before = sum(1 for number, norm in raised if number <= total - _LATELY and norm >= as_high)
        covered = total - (raised[0][0] if len(raised) == _MOST_RAISED else 0)
        share = min(0.5, before / max(covered, 1))
        count = 2
        while count < _MOST_TOGETHER and (count + 1) * share**count > self.by_chance:
            count += 1
        return count

    def _judge_open(self, track: StepSeries, window: Window, state: dict[str, Any]) -> Finding | None:
        """While its alert is open: whether the norms are still above what was usual before."""
        values, steps = _measured(track)
        if len(values) < 3 or state["usual"] <= 0 or track.total > state["fired"] + _SETTLED:
            return None
        rise = _Rise.over(state["usual"], 0.0, values, steps, 2)
        return self._finding(window, track, rise) if math.exp(rise.lowest) >= self._much() else None

    def _finding(self, window: Window, track: StepSeries, rise: _Rise) -> Finding:
        lower = math.exp(rise.lowest)
        layers = _layers(window, rise.since)
        layer, layer_times = layers[0] if layers else (None, None)
        # the others have not risen nearly as far
        stands_out = len(layers) == _NAMED and layers[0][1] >= max(_MUCH, _MUCH * layers[2][1])
        many = len(rise.logs)
        return self.found(
            "critical" if lower >= self.critical_times else "warning",
            cause="one layer" if stands_out else "learning rate" if _is_rising(window) else "",
            since_step=rise.since,
            evidence={
                "norm": rise.norm, "step": rise.at, "median": rise.level, "times": math.exp(rise.logs[-1]),
                "lowest_times": lower, "high_steps": many, "newest_steps": many + 1, "spread": rise.spread,
                "layer": layer, "layer_times": layer_times, "layers": dict(layers), "measured_steps": track.total,
                **surroundings(window),
            },
        )  # fmt: skip


class _Rise(NamedTuple):
    """The highest of the newest norms against those before, of one norm more than there are of them.

    norm, at: the highest and its step; since: the first of their steps; level: the median before; spread: of the logarithms
    of the norms before; logs: of them as multiples of the level, ascending.
    """

    norm: float
    at: int
    since: int
    level: float
    spread: float
    logs: list[float]

    @property
    def lowest(self) -> float:
        return self.logs[0]

    @classmethod
    def of(cls, values: list[float], steps: list[int], count: int, history: int) -> _Rise:
        past = np.sort(np.log(np.asarray(values[: -count - 1]))[-history:])
        quarter = len(past) // 4
        spread = float(past[3 * quarter] - past[quarter]) / 1.349
        return cls.over(math.exp(past[len(past) // 2]), spread, values, steps, count)

    @classmethod
    def over(cls, level: float, spread: float, values: list[float], steps: list[int], count: int) -> _Rise:
        """Against a level that is known."""
        rows = sorted(zip(values[-count - 1 :], steps[-count - 1 :], strict=True))[-count:]
        logs = [math.log(norm / level) for norm, _ in rows]
        return cls(*rows[-1], min(step for _, step in rows), level, spread, logs)


def _fresh() -> dict[str, Any]:
    """level, taken: the median for the quick look, and after how many norms it was taken; highest: the highest second of
    three so far; raised: high norms: how many there had been, and the logarithm of the norm as a multiple of the level;
    scales: [step, loss scale] where it changed; usual, fired: the median before the norms rose, and after how many norms
    they had."""
    return {"level": 0.0, "taken": 0, "highest": 0.0, "raised": [], "scales": [], "usual": 0.0, "fired": 0}


def _measured(track: StepSeries) -> tuple[list[float], list[int]]:
    """The norms that are kept, and their steps: without those that are not finite (a scaler skips such a step, and another
    rule tells of it) and without zeros (nothing was measured, or nothing was to learn)."""
    values, steps = track.last(track.size), track.last_steps(track.size)
    places = [place for place, value in enumerate(values) if 0 < value < math.inf]
    if 2 * len(places) < len(values):
        return [], []
    return [values[place] for place in places], [steps[place] for place in places]


def _note_scale(scales: list[list[float]], step: int, track: StepSeries) -> None:
    scale = next(iter(track.before(step, 1)), math.nan)
    if 0 < scale < math.inf and (not scales or scales[-1][1] != scale):
        scales.append([step, scale])
        del scales[:-_MOST_SCALES]


def _unscaled(values: list[float], steps: list[int], scales: list[list[float]]) -> list[float]:
    """The norms as multiples of the scale of their steps, in units of the newest scale. The rise that counts is the smaller
    of both: nobody says whether norms were measured before they were unscaled."""
    if not scales or scales[-1][0] <= steps[0]:
        return values
    newest, place, found = scales[-1][1], 0, []
    for value, step in zip(values, steps, strict=True):
        while place + 1 < len(scales) and scales[place + 1][0] <= step:
            place += 1
        found.append(value * newest / scales[place][1])
    return found


def _is_rising(window: Window) -> bool:
    """Whether the learning rate rises, or was raised a moment ago: in the warm-up, or as a schedule begins again."""
    track = window.by_step.get("lr")
    rates = track.before(window.at, 64) if track is not None else []
    return len(rates) >= 32 and rates[-1] > 1.02 * min(rates)


def _layers(window: Window, since: int) -> list[tuple[str, float]]:
    """The layers whose newest norms are the highest multiples of their own medians before. Empty if they were not measured
    since, or too rarely before."""
    family = window.by_family.get(_LAYERS)
    if family is None:
        return []
    names, steps, norms = family.matrix(window.at)
    before = sum(step < since for step in steps)
    if before < 3 or before == len(steps):
        return []
    known = np.isfinite(norms[:, :before]).sum(axis=1) >= 3
    usual = np.nanmedian(norms[known, :before], axis=1)
    with np.errstate(all="ignore"):
        times = np.nan_to_num(norms[known, -1] / usual, nan=0.0, posinf=0.0)
    kept = [name for name, is_known in zip(names, known.tolist(), strict=True) if is_known]
    order = np.argsort(-times)[:_NAMED].tolist()
    return [(kept[place].removeprefix(_LAYERS), float(times[place])) for place in order]
