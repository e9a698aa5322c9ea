"""How the speed of a run differs from the first one's, and what in the step makes the difference. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LEAST_INDEPENDENT", "LEAST_STEPS", "Change", "changes", "mean_changes"]

_SPEED = ("tokens_per_s", "samples_per_s", "step_time_s")
LEAST_STEPS, LEAST_INDEPENDENT = 50, 20
"""Of the server's interval, named in the sentence on a run that has fewer."""
_PLAIN_TIMES, _PLAIN_STEPS = 1.5, 50
"""So large a difference, of medians over so many steps each, is reported without an interval that slow steps in groups deny."""
_WORTH = 0.2  # of the change of the step time: a phase that makes less of it is not named


@dataclass(frozen=True, slots=True)
class Change:
    """word: faster, slower, same, too_short or unknown. measure: what it is said of, throughput where there is one. times:
    about how many times as fast or slow, where that is plain but no interval can be given; else 0.
    percent, low, high: by how much, with the 95 % interval, above 0; of a `same`, high is how much may be hidden. phase:
    the series of the phase that changed most in that direction, or ""; seconds: by how much, a step. Of too_short, lacking:
    the run that has too few steps; steps: how many have the measure after the warm-up; independent: as how many independent
    ones they count."""

    word: str
    measure: str = ""
    percent: float = 0.0
    low: float = 0.0
    high: float = 0.0
    phase: str = ""
    seconds: float = 0.0
    lacking: str = ""
    steps: int = 0
    independent: int = 0
    times: float = 0.0

    @property
    def is_grouped(self) -> bool:
        """Whether the steps are enough in number, but slow ones come in groups."""
        return self.steps >= LEAST_STEPS


def changes(comparison: Mapping[str, Any]) -> list[Change]:
    """One for each run after the first."""
    speed = {one["name"]: one for one in comparison["speed"]}
    measure = next((speed[name] for name in _SPEED if name in speed), None)
    return [_change(measure, speed, place, comparison["sides"]) for place in range(1, len(comparison["sides"]))]


def mean_changes(comparison: Mapping[str, Any]) -> list[Change | None]:
    """The same of the mean step time, where it tells another story than the medians: some steps are much slower than most,
    and a median does not see them. None where it adds nothing."""
    mean = comparison["mean_step"]
    median = next((one for one in comparison["speed"] if one["name"] == "step_time_s"), None)
    phases = {one["name"]: one for one in comparison["speed"] if one["name"].startswith("phase/")}
    places = range(1, len(comparison["sides"]))
    return [
        _change(mean, {"step_time_s": mean, **phases}, place, comparison["sides"])
        if mean and _adds(mean, median, place)
        else None
        for place in places
    ]


def _adds(mean: Mapping[str, Any], median: Mapping[str, Any] | None, place: int) -> bool:
    if median is None or mean["word"][place] not in ("faster", "slower"):
        return False
    if mean["word"][place] != median["word"][place]:
        return True
    return bool(mean["low"][place] > median["high"][place] or mean["high"][place] < median["low"][place])


def _change(
    measure: Mapping[str, Any] | None, speed: Mapping[str, Mapping[str, Any]], place: int, sides: Sequence[Mapping[str, Any]]
) -> Change:  # fmt: skip
    if measure is None:
        return Change("unknown")
    word, name = measure["word"][place], measure["name"]
    if word == "too_short":
        plain = _plainly(measure, speed, place)
        if plain is not None:
            return plain
        fewest = min((0, place), key=lambda at: (min(measure["steps"][at], LEAST_STEPS), measure["independent"][at]))
        steps, independent = measure["steps"][fewest], measure["independent"][fewest]
        return Change(word, name, lacking=sides[fewest]["name"], steps=steps, independent=independent)
    if measure["ratio"][place] is None:
        return Change(word, name)
    percents = sorted(100 * (measure[one][place] - 1) for one in ("low", "high"))
    if word == "same":
        return Change(word, name, high=max(map(abs, percents)))
    low, high = sorted(map(abs, percents))
    phase, seconds = _cause(speed, place, is_faster=word == "faster")
    return Change(word, name, abs(100 * (measure["ratio"][place] - 1)), low, high, phase, seconds)


def _plainly(measure: Mapping[str, Any], speed: Mapping[str, Mapping[str, Any]], place: int) -> Change | None:
    """A difference that nobody needs an interval for."""
    first, other = measure["values"][0], measure["values"][place]
    if not first or not other or min(measure["steps"][0], measure["steps"][place]) < _PLAIN_STEPS:
        return None
    times = other / first if measure["name"] == "step_time_s" else first / other
    if 1 / _PLAIN_TIMES < times < _PLAIN_TIMES:
        return None
    phase, seconds = _cause(speed, place, is_faster=times < 1)
    word = "slower" if times > 1 else "faster"
    return Change(word, measure["name"], phase=phase, seconds=seconds, times=max(times, 1 / times))


def _cause(speed: Mapping[str, Mapping[str, Any]], place: int, *, is_faster: bool) -> tuple[str, float]:
    """The phase that changed most in the direction of the whole."""
    whole = _grown(speed["step_time_s"]["values"], place) if "step_time_s" in speed else None
    grown = {
        name: change
        for name, one in speed.items()
        if name.startswith("phase/") and (change := _grown(one["values"], place)) is not None
    }
    if not grown or not whole:
        return "", 0.0
    phase = min(grown, key=lambda name: grown[name] if is_faster else -grown[name])
    counts = (grown[phase] < 0) is is_faster and abs(grown[phase]) >= _WORTH * abs(whole)
    return (phase, abs(grown[phase])) if counts else ("", 0.0)


def _grown(values: Sequence[float | None], place: int) -> float | None:
    first, other = values[0], values[place]
    return None if first is None or other is None else other - first
