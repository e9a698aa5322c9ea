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
_FEWEST = 3  # norms in which a rise can show
_MOST_TOGETHER = 12
_MOST_RAISED = 64  # high norms that are remembered
_LATELY = 32  # measurements that a rise may take
_NAMED = 5  # layers that the evidence names
_MUCH = 5.0  # times, by which one layer stands out


@dataclass(frozen=True, kw_only=True)
class GradNormExplosion(Rule):
    """Of the newest norms, more than one is far above the median of the `history` measured steps before.

    A single step cannot do it: clipping catches those, and healthy runs have them (of 19,560 steps of a GPT-2 run, single
    norms reach 7.5 times the median, but the second highest of three never more than 1.9 times). Two of three steps are
    enough where high norms are rare; where they are not, as many as do not come together by chance (_enough). Steps are
    counted as they are measured, for many runs measure gradients now and then only.

    What is usual is said by the run itself: its median, the spread of the logarithm of its norms (IQR / 1.349), and what
    it had before: a rise that comes again is reported the first time. The norm must have risen by near_times against the 16
    measurements before: norms that grow slowly are healthy. Twice as much is needed while the learning rate rises,
    early_factor times as much (and more than ever before in the run) in the first steps, and where the loss is as restless
    as in reinforcement learning. A run whose norms had become next to nothing (a solved problem, a reward that is never met)
    must exceed what it once had. Norms that follow a loss scale are judged as multiples of it.
    """

    warning_times: float = 5.0  # of the high norms together, as a geometric mean
    second_times: float = 2.5  # of the lowest of them
    critical_times: float = 10.0  # of the lowest of them
    spreads: float = 5.0
    second_spreads: float = 3.0
    near_times: float = 1.5
    record_times: float = 1.5
    by_chance: float = 3e-6  # how often high norms may come together by chance
    history: int = within(128, least=16, most=_KEEP)
    least_history: int = within(64, least=16, most=128)
    early_steps: int = 200
    early_history: int = within(32, least=16, most=128)
    early_factor: float = 4.0
    rising_factor: float = 2.0
    faded_share: float = 1e-3
    clear_times: float = 2.0
    most_observations: int = 1000

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
        if window.is_firing(self.id):
            return self._judge_open(track, window, state)
        self._learn(track, state, newest[-1], second)
        if second is not None and (second <= 0 or second < self.clear_times * state["level"]):
            return None  # nearly every step ends here
        rise = self._rise(window, track, state, highest)
        if rise is None:
            return None
        state["usual"], state["fired"] = rise.level, track.total
        return self._finding(window, track, rise)

    def _learn(self, track: StepSeries, state: dict[str, Any], norm: float, second: float | None) -> None:
        """Takes a note of what this run is like."""
        if state["peak"]:  # an alert is over: so far it rose
            state["raised"].append([track.total, state["peak"], state["peak"]])
            state["peak"] = 0.0
        if track.total >= state["taken"] + _LEVEL_EVERY:
            known = sorted(value for value in track.last(self.history) if 0 < value < math.inf)
            state["level"], state["taken"] = (known[len(known) // 2] if known else 0.0), track.total
        if norm > self.clear_times * state["level"] > 0:
            near = sorted(track.last(17)[:-1])
            if near and norm > self.near_times * near[len(near) // 2]:  # and is not on its way down from the start
                most = self.critical_times * state["level"]
                both = (norm, second if second is not None and second > 0 else norm)
                state["raised"].append([track.total, *(math.log(min(one, most) / state["level"]) for one in both)])
        del state["raised"][:-_MOST_RAISED]

    def _rise(self, window: Window, track: StepSeries, state: dict[str, Any], highest: float) -> _Rise | None:
        """How far the newest norms are above the ones before; None if not far enough."""
        values, steps = _measured(track)
        early = window.at - window.start_step <= self.early_steps or len(values) < self.least_history + _FEWEST
        if len(values) < (self.early_history if early else self.least_history) + _FEWEST:
            return None
        values = self._without_scale(values, steps, state["scales"])
        history = max(self.early_history, len(values) // 2) if early else self.history  # norms fall from large at first
        count = self._enough(state["raised"], track.total, _Rise.of(values, steps, 2, history).lowest)
        if len(values) < self.early_history + count + 1:
            return None
        rise = _Rise.of(values, steps, count, history)
        restless = is_restless(window, rise.since - 1)
        factor = self.early_factor if early or restless else self.rising_factor if _is_rising(window) else 1.0
        limit = math.log(factor)
        record = max((one[2] for one in state["raised"] if one[0] <= track.total - _LATELY), default=-math.inf)
        if (
            rise.lowest < limit + max(math.log(self.second_times), self.second_spreads * rise.spread)
            or rise.together < limit + max(math.log(self.warning_times), self.spreads * rise.spread)
            or rise.lowest < rise.near + math.log(self.near_times)
            or rise.lowest < record + math.log(self.record_times)
        ):
            return None
        lowest = math.exp(rise.lowest) * rise.level
        if rise.level < self.faded_share * highest and lowest <= self.warning_times * highest:
            return None
        return None if (early or restless) and lowest <= highest else rise

    def _enough(self, raised: list[list[float]], total: int, lowest: float) -> int:
        """How many norms of the newest must be high, of one more: as many as are that high together by chance less often
        than by_chance, as often as single ones were so far."""
        as_high = min(lowest, math.log(self.critical_times)) - 0.2
        before = sum(1 for number, norm, _ in raised if number <= total - _LATELY and norm >= as_high)
        covered = total - (raised[0][0] if len(raised) == _MOST_RAISED else 0)
        share = min(0.5, before / max(covered, 1))
        count = 2
        while count < _MOST_TOGETHER and (count + 1) * share**count > self.by_chance:
            count += 1
        return count

    def _without_scale(self, values: list[float], steps: list[int], scales: list[list[float]]) -> list[float]:
        """The norms as they are; as multiples of the loss scale where they follow it, or where nobody can say yet whether
        they do and it makes the rise smaller."""
        if not scales or scales[-1][0] <= steps[0]:
            return values
        other = _unscaled(values, steps, scales)
        follows = _variation(other[:-3]) - _variation(values[:-3])
        if follows > 1e-9:
            return values
        return min(values, other, key=lambda norms: sorted(norms[-3:])[-2] / sorted(norms)[len(norms) // 2])

    def _judge_open(self, track: StepSeries, window: Window, state: dict[str, Any]) -> Finding | None:
        """While its alert is open: whether the norms are still above what was usual before. What lasts for
        most_observations is the level of this run."""
        values, steps = _measured(track)
        usual = state["usual"]
        if len(values) < _FEWEST or usual <= 0 or track.total > state["fired"] + self.most_observations:
            return None
        rise = _Rise.over(usual, values, steps, 2)
        state["peak"] = max(state["peak"], min(rise.lowest, math.log(self.critical_times)))
        return self._finding(window, track, rise) if rise.lowest >= math.log(self.clear_times) else None

    def _finding(self, window: Window, track: StepSeries, rise: _Rise) -> Finding:
        lower = math.exp(rise.lowest)
        layers = _layers(window, rise.since)
        layer, layer_times = layers[0] if layers else (None, None)
        return self.found(
            "critical" if lower >= self.critical_times else "warning",
            cause="one layer" if _stands_out(layers) else "learning rate" if _is_rising(window) else "",
            since_step=rise.since,
            evidence={
                "norm": rise.norm, "step": rise.at, "median": rise.level, "times": math.exp(rise.first),
                "lowest_times": lower, "high_steps": rise.many, "newest_steps": rise.many + 1, "spread": rise.spread,
                "layer": layer, "layer_times": layer_times, "layers": dict(layers), "measured_steps": track.total,
                **surroundings(window),
            },
        )  # fmt: skip


class _Rise(NamedTuple):
    """The highest of the newest norms against those before, of one norm more than there are of them. All from `first` on
    are logarithms of multiples of the level.

    norm, at: the highest and its step; since: the first of their steps; many: how many they are; level: the median
    before; first, lowest: the highest and the lowest of them; together: their geometric mean; near: of the 16 norms before;
    spread: of the logarithms of the norms before.
    """

    norm: float
    at: int
    since: int
    many: int
    level: float
    first: float
    lowest: float
    together: float
    near: float = 0.0
    spread: float = 0.0

    @classmethod
    def of(cls, values: list[float], steps: list[int], count: int, history: int) -> _Rise:
        past = np.log(np.asarray(values[: -count - 1]))[-history:]
        ordered, quarter = np.sort(past), len(past) // 4
        level = float(ordered[len(past) // 2])
        spread = float(ordered[3 * quarter] - ordered[quarter]) / 1.349
        near = float(np.sort(past[-16:])[8])
        return cls.over(math.exp(level), values, steps, count)._replace(near=near - level, spread=spread)

    @classmethod
    def over(cls, level: float, values: list[float], steps: list[int], count: int) -> _Rise:
        """Against a level that is known."""
        rows = sorted(zip(values[-count - 1 :], steps[-count - 1 :], strict=True))[-count:]
        logs = [math.log(norm / level) for norm, _ in rows]
        return cls(*rows[-1], min(step for _, step in rows), count, level, logs[-1], logs[0], sum(logs) / count)


def _fresh() -> dict[str, Any]:
    """level, taken: the median for the quick look, and after how many norms it was taken; highest: the highest second of
    three so far; raised: high norms: how many there had been, and the logarithms of the norm and of the second of three as
    multiples of the level; scales: [step, loss scale] where it changed; usual, fired: the median before the norms rose, and
    after how many norms they had; peak: the highest second of three since then."""
    return {
        "level": 0.0, "taken": 0, "highest": 0.0, "raised": [], "scales": [], "usual": 0.0, "fired": 0, "peak": 0.0,
    }  # fmt: skip


def _measured(track: StepSeries) -> tuple[list[float], list[int]]:
    """The norms that are kept, and their steps: without those that are not finite (a scaler skips such a step, and another
    rule tells of it) and without zeros (nothing was measured, or nothing was to learn)."""
    values, steps = track.last(track.size), track.last_steps(track.size)
    places = [place for place, value in enumerate(values) if 0 < value < math.inf]
    if 2 * len(places) < len(values):
        return [], []
    return [values[place] for place in places], [steps[place] for place in places]


def _variation(values: list[float]) -> float:
    """How far the norms go up and down, as a sum of factors' logarithms."""
    return float(np.abs(np.diff(np.log(values))).sum())


def _note_scale(scales: list[list[float]], step: int, track: StepSeries) -> None:
    scale = next(iter(track.before(step, 1)), math.nan)
    if 0 < scale < math.inf and (not scales or scales[-1][1] != scale):
        scales.append([step, scale])
        del scales[:-_MOST_SCALES]


def _unscaled(values: list[float], steps: list[int], scales: list[list[float]]) -> list[float]:
    """The norms as multiples of the scale of their steps, in units of the newest scale."""
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


def _stands_out(layers: list[tuple[str, float]]) -> bool:
    """Whether the trouble is one layer's: the others have not risen nearly as far."""
    return len(layers) == _NAMED and layers[0][1] >= max(_MUCH, _MUCH * layers[2][1])
