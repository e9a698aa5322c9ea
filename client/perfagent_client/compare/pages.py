"""A comparison as lines and tables for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from perfagent.command_line.terminal_output import Line, Table
from perfagent.wire import metric
from perfagent.wire.quantities import duration, figure, short, size, some
from perfagent_client.compare.change import LEAST_INDEPENDENT, LEAST_STEPS, Change, changes, mean_changes

__all__ = ["comparison_page", "headline"]

_WORDS = {
    "first": "",
    "same": "no difference found",
    "too_short": "too few steps for an interval",
    "unknown": "no steps",
}
_NOT_ALIKE = {
    "world_size": "different numbers of processes", "batch_size": "different batch sizes", "model": "different models",
}  # fmt: skip
_MOST_DIFFERENCES = 40


def comparison_page(found: Mapping[str, Any], *, everything: bool = False) -> Iterator[Line | Table]:
    sides = found["sides"]
    for side, change, mean in zip(sides[1:], changes(found), mean_changes(found), strict=True):
        yield Line(headline(side["name"], sides[0]["name"], mean or change), "bold")
        if mean is not None:
            yield Line(_by_median(side["name"], sides[0]["name"], change))
    for gain in found["gains"]:
        name = next(side["name"] for side in sides if side["run"] == gain["run"])
        yield Line(_gain(name, gain))
    if found["not_alike"]:
        alike = ", ".join(_NOT_ALIKE[one] for one in found["not_alike"])
        yield Line(f"Read speed and loss with care: {alike}.", "yellow")
    yield Line()
    yield Table(["run", "steps", "state", "verdict"], [_run(side) for side in sides], right=(1,), narrow=(0, 3))
    yield Line()
    yield from _speed(found)
    yield Line()
    yield Table(["", *(side["name"] for side in sides)], list(_results(found)), right=range(1, len(sides) + 1))
    yield from _differences(found, everything=everything)


def _by_median(name: str, first: str, change: Change) -> str:
    """What the median step says where the mean step says something else."""
    if change.word == "same":
        return "The median step shows no such difference: the slow steps cause it."
    if change.word in ("too_short", "unknown"):
        return "There are too few steps to compare the median step."
    return f"By the median step, {headline(name, first, change)}"


def headline(name: str, first: str, change: Change) -> str:
    if change.word == "too_short":
        has = f"{change.lacking} has {some(change.steps, 'step')} with {metric(change.measure).title} after the warm-up"
        lacks = f"at least {LEAST_STEPS} are needed"
        if change.is_grouped:
            lacks = f"slow steps come in groups, so they count as {change.independent}; at least {LEAST_INDEPENDENT} are needed"
        return f"{name}: too few steps to say how fast it is. {has}; {lacks}."
    if change.word == "unknown":
        return f"{name}: nothing says how fast it is."
    if change.word == "same":
        return f"No difference in speed was found between {name} and {first}; any difference is at most {short(change.high)} %."
    more = "takes {} % less time a step" if change.word == "faster" else "takes {} % more time a step"
    if change.measure != "step_time_s":
        more = "is {} % " + change.word
    why = ""
    if change.phase:
        title = metric(change.phase).title.lower()
        why = f": {title} is {duration(change.seconds)} a step {'shorter' if change.word == 'faster' else 'longer'}"
    if change.times:
        return f"{name} is about {short(change.times)} × {change.word} than {first}{why}."
    return f"{name} {more.format(short(change.percent))} than {first} ({short(change.low)} to {short(change.high)} %){why}."


def _gain(name: str, gain: Mapping[str, Any]) -> str:
    return (
        f"Predicted for {gain['rule']}: steps up to {short(gain['predicted_pct'])} % shorter. In {name}, which lacks this "
        f"finding, they are {short(gain['measured_pct'])} % shorter ({short(gain['low_pct'])} to {short(gain['high_pct'])} %)."
    )


def _run(side: Mapping[str, Any]) -> list[str]:
    steps = "none" if side["begin"] is None else f"{side['begin']:,} to {side['end']:,}"
    return [side["name"], steps, side["state"], side["title"]]


def _speed(found: Mapping[str, Any]) -> Iterator[Table]:
    names = [side["name"] for side in found["sides"]]
    rows = [[metric(one["name"]).title, *(_value(one, place) for place in range(len(names)))] for one in found["speed"]]
    if found["mean_step"] is not None:
        rows.append(["Mean step time", *(_value(found["mean_step"], place) for place in range(len(names)))])
    if rows:
        yield Table(["median; phases: mean a step", *names], rows, right=range(1, len(names) + 1))


def _value(measure: Mapping[str, Any], place: int) -> str:
    value, share = measure["values"][place], measure["shares"][place]
    if value is None:
        return "–"
    shown = figure(measure["name"], value)
    if share is not None:
        return f"{shown} ({100 * share:.3g} %)"
    word = measure["word"][place]
    if measure["ratio"][place] is None or word == "same":
        return f"{shown} {_WORDS[word]}".strip()
    low, high = (100 * (measure[edge][place] - 1) for edge in ("low", "high"))
    return f"{shown} ({low:+.3g} to {high:+.3g} %)"


def _results(found: Mapping[str, Any]) -> Iterator[list[str]]:
    sides: Sequence[Mapping[str, Any]] = found["sides"]
    if any(side["loss_at"] is not None for side in sides):
        yield [f"loss near step {found['common_step']:,}", *(_number(side["loss_at"]) for side in sides)]
        yield ["lowest loss", *(_best(side) for side in sides)]
    for name in dict.fromkeys(name for side in sides for name in side["peaks"]):
        peaks = [side["peaks"].get(name) for side in sides]
        yield [f"highest {metric(name).title.lower()}", *("–" if one is None else size(one) for one in peaks)]
    if any(side["only"] for side in sides):
        yield ["alerts that only it has", *(", ".join(side["only"]) or "–" for side in sides)]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _best(side: Mapping[str, Any]) -> str:
    return "–" if side["loss_best"] is None else f"{side['loss_best']:.4g} in step {side['loss_best_step']:,}"


def _differences(found: Mapping[str, Any], *, everything: bool) -> Iterator[Line | Table]:
    different, equal = found["differences"]["different"], sum(found["differences"]["equal"].values())
    yield Line()
    if not different:
        yield Line("No setting differs.")
        return
    shown = different if everything else different[:_MOST_DIFFERENCES]
    rows = [
        [one["group"], one["name"], *("–" if value is None else str(value) for value in one["values"])] for one in shown
    ]
    heads = ["differs", "", *(side["name"] for side in found["sides"])]
    yield Table(heads, rows, narrow=range(1, len(heads)))
    left = len(different) - len(shown)
    if equal:
        yield Line(f"{equal} other entries are equal.")
    if left:
        yield Line(f"{left} more differ: --all shows them.")
