"""What differs in words, the runs one below the other, where a step goes in each, and their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dash import html

from perfagent.wire.quantities import duration, short
from perfagent_client.compare.change import LEAST_INDEPENDENT, LEAST_STEPS, Change, changes, mean_changes
from perfagent_dashboard.components.attributes import hyphenated
from perfagent_dashboard.components.feedback import nothing
from perfagent_dashboard.components.marks import severity_mark, state_badge
from perfagent_dashboard.components.numbers import percent, quantity, si
from perfagent_dashboard.components.sweep import swatch
from perfagent_dashboard.components.tables import table
from perfagent_dashboard.words import say, title_of

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["different", "headlines", "runs_table", "step_table"]

_RATES = ("tokens_per_s", "samples_per_s")
_WHISKER_PX = 120
_FEW = 4  # runs: of each there is a sentence
_WIDEST = 0.5  # of a ratio, to either side: a whisker that goes further is cut


def headlines(found: Mapping[str, Any], swept: Mapping[str, Any]) -> Component:
    """Which run is the best, one line a run of which something can be said, and what to know before one believes them.
    swept: of GET /groups/runs."""
    sides = found["sides"]
    first = sides[0]["name"]
    lines: list[Component] = []
    unknown, same = [], []
    for side, change, mean in zip(sides[1:], changes(found), mean_changes(found), strict=True):
        whole = mean or change
        if whole.word == "unknown" and len(sides) > 2:
            unknown.append(side["name"])
            continue
        if whole.word == "same" and mean is None and len(sides) > _FEW:
            same.append(whole.high)
            continue
        lines.append(html.P(headline(side["name"], first, whole), className=f"headline {whole.word}"))
        if mean is not None:
            lines.append(html.P(_by_median(side["name"], first, change)))
    if same:
        told = say("change_same_of", count=len(same), first=first, most=short(max(same), 2))
        lines.append(html.P(told, className="headline" if not lines else ""))
    if unknown:
        lines.append(html.P(say("change_unknown_of", count=len(unknown)), title=", ".join(unknown), className="quiet"))
    lines += [html.P(_gain(sides, gain), className="gain") for gain in found["gains"]]
    if found["not_alike"]:
        alike = ", ".join(say(f"not_alike_{one}") for one in found["not_alike"])
        lines.append(html.P([severity_mark("warning"), " ", say("not_alike", what=alike)]))
    if len(sides) > 2 and (best := swept["best"]):
        name = swept["goal"][4:]
        value = " ".join(quantity(name, best["value"])).strip()
        told = say("runs_best", name=best["name"], metric=title_of(name), figures=value)
        lines.append(html.P(told, className="headline"))
    return html.Section(lines, className="card headlines")


def _by_median(name: str, first: str, change: Change) -> str:
    """What the median step says where the mean step says something else."""
    if change.word == "same":
        return say("change_mean_only")
    if change.word in ("too_short", "unknown"):
        return say("change_median_unknown")
    return say("change_median", told=headline(name, first, change))


def headline(name: str, first: str, change: Change) -> str:
    if change.word == "unknown":
        return say("change_unknown", name=name)
    if change.word == "too_short":
        return say(
            "change_grouped" if change.is_grouped else "change_too_short", name=name, lacking=change.lacking,
            steps=change.steps, measure=title_of(change.measure), independent=change.independent,
            least=LEAST_INDEPENDENT if change.is_grouped else LEAST_STEPS,
        )  # fmt: skip
    if change.word == "same":
        return say("change_same", name=name, first=first, most=short(change.high))
    kind = change.word if change.measure != "step_time_s" else f"{change.word}_step"
    told = say(
        f"change_{kind}" if not change.times else f"change_about_{change.word}", name=name, first=first,
        percent=short(change.percent), low=short(change.low), high=short(change.high), times=short(change.times),
    )  # fmt: skip
    if not change.phase:
        return say("change_plain", told=told)
    why = "change_shorter" if change.word == "faster" else "change_longer"
    phase = title_of(change.phase).lower()
    return say("change_why", told=told, why=say(why, phase=phase, seconds=duration(change.seconds)))


def _gain(sides: Sequence[Mapping[str, Any]], gain: Mapping[str, Any]) -> str:
    return say(
        "gain_came", rule=gain["title"] or gain["rule"], name=next(one["name"] for one in sides if one["run"] == gain["run"]),
        predicted=short(gain['predicted_pct']), measured=short(gain['measured_pct']), low=short(gain['low_pct']),
        high=short(gain['high_pct']),
    )  # fmt: skip


def runs_table(found: Mapping[str, Any], swept: Mapping[str, Any]) -> Component:
    """One row a run: verdict, goal, speed with its interval, loss, memory. swept: of GET /groups/runs."""
    best = (swept["best"] or {}).get("run", "")
    runs, goals = [one["run"] for one in swept["runs"]], swept["results"][:1]
    reached = [(one["name"], dict(zip(runs, one["values"], strict=True))) for one in goals if one["name"] != "loss"]
    speed = {one["name"]: one for one in found["speed"]}
    measures = [name for name in (*_RATES, "step_time_s") if name in speed]
    sides = found["sides"]
    peaks = list(dict.fromkeys(name for side in sides for name in side["peaks"]))
    heads = [
        say("column_run"), say("column_verdict"), *map(title_of, [*(name for name, _ in reached), *measures]),
        say("loss_near", step=f"{found['common_step'] or 0:,}"), say("loss_best"),
        *(say("highest", what=title_of(name)) for name in peaks), say("compare_steps"),
    ]  # fmt: skip
    rows = [
        [
            _name(side, place, is_best=side["run"] == best),
            html.Span([severity_mark(side["severity"]), " ", side["title"]], className="cell-verdict"),
            *(" ".join(quantity(name, values.get(side["run"]))).strip() for name, values in reached),
            *(_speed(speed[name], place, found["mean_step"] if name == "step_time_s" else None) for name in measures),
            si(side["loss_at"]), _best(side),
            *(" ".join(quantity(name, side["peaks"].get(name))) for name in peaks),
            _steps(side),
        ]
        for place, side in enumerate(sides)
    ]  # fmt: skip
    return table(heads, rows, empty="", keys=[side["run"] for side in sides])


def _name(side: Mapping[str, Any], place: int, *, is_best: bool) -> Component:
    link = f"/run/{quote(side['run'], safe='')}"
    parts: list[Any] = [
        swatch(place),
        html.A(side["name"], href=link, **hyphenated(data_nav=link)),
        html.Br(),
        state_badge(side["state"]),
        html.B(f" ★ {say('best')}", className="best") if is_best else None,
    ]
    if place == 0:
        parts.append(html.Small(f" {say('baseline')}"))
    if side["only"]:
        parts.append(html.Small(say("only_here", rules=", ".join(side["only"])), className="only"))
    return html.Div(parts)


def _speed(measure: Mapping[str, Any], place: int, mean: Mapping[str, Any] | None) -> Component:
    """mean: of the same quantity, for the step time."""
    shown: Any = " ".join(quantity(measure["name"], measure["values"][place]))
    if mean:
        told = say("mean", value=" ".join(quantity(mean["name"], mean["values"][place])))
        shown = html.Span([shown, " ", html.Small(told)])
    if place == 0 or measure["ratio"][place] is None:
        word = measure["word"][place]
        return html.Div([shown, html.Br(), html.Small("" if place == 0 else say(f"word_{word}"))])
    low, high = measure["low"][place], measure["high"][place]
    told = say("interval", low=f"{100 * (low - 1):+.3g}", high=f"{100 * (high - 1):+.3g}").replace("-", "−")
    return html.Div([shown, _whisker(low, high, measure["word"][place]), html.Small(told)])


def _whisker(low: float, high: float, word: str) -> Component:
    """Where the interval lies, beside no change in the middle."""

    def place(ratio: float) -> float:
        return 50 + 50 * max(-1.0, min(1.0, (ratio - 1) / _WIDEST))

    left, right = place(low), place(high)
    bar = html.I(style={"left": f"{left:.1f}%", "width": f"{max(right - left, 2):.1f}%"}, className=word)
    return html.Span(bar, className="whisker", style={"width": f"{_WHISKER_PX}px"}, **hyphenated(aria_hidden="true"))


def _best(side: Mapping[str, Any]) -> str:
    best = side["loss_best"]
    return "" if best is None else say("best_in", value=si(best), step=f"{side['loss_best_step']:,}")


def _steps(side: Mapping[str, Any]) -> str:
    if side["begin"] is None:
        return say("na")
    return f"{side['begin']:,}–{side['end']:,}"


def step_table(found: Mapping[str, Any]) -> list[Component]:
    """Where a step goes, run by run; nothing where no run says so."""
    phases = [one for one in found["speed"] if one["name"].startswith("phase/")]
    if not phases:
        return []
    heads = [say("phase"), *(side["name"] for side in found["sides"])]
    rows = [[title_of(one["name"]), *(_phase(one, place) for place in range(len(heads) - 1))] for one in phases]
    return [html.H2(say("where")), table(heads, rows, empty="")]


def _phase(measure: Mapping[str, Any], place: int) -> Component:
    value, share = measure["values"][place], measure["shares"][place]
    if value is None:
        return html.Span(say("na"))
    phase = measure["name"].removeprefix("phase/").removesuffix("_s")
    width = {"width": f"{100 * min(share or 0, 1):.1f}%", "background": f"var(--phase-{phase})"}
    return html.Div(
        [
            " ".join(quantity(measure["name"], value)),
            html.Small(f" {percent(share)} %" if share is not None else ""),
            html.Span(html.I(style=width), className="share-bar", **hyphenated(aria_hidden="true")),
        ]
    )


def different(found: Mapping[str, Any], names: Sequence[str], search: str) -> list[Component]:
    """What differs in the settings of the runs. search: words that a setting's name or one of its values must all have."""
    words = search.lower().split()
    rows = [
        [
            html.Div([html.B(one["name"]), html.Br(), html.Small(say(f"config_{one['group']}"))]),
            *map(_value, one["values"]),
        ]
        for one in found["different"]
        if all(word in f"{one['name']} {one['values']}".lower() for word in words)
    ]
    equal = sum(found["equal"].values())
    return [
        table([say("setting"), *names], rows, empty=say("nothing_found" if words else "no_difference")),
        nothing(say("equal_settings", count=equal)) if equal else html.Span(),
    ]


def _value(value: Any) -> Component:
    if value is None:
        return html.Span("–", className="quiet")
    return html.Code(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
