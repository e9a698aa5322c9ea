"""Runs and findings for notebooks, as HTML without scripts and style sheets: a notebook that is sent on, or shown by
a site that takes those out, still looks so. Text has the notebook's own color, in light and dark. Everything that comes from a
run is escaped. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Protocol

from perfagent.wire.quantities import figure, quantity

__all__ = ["card", "curves_html", "finding_html", "link", "table_html"]

_COLORS = {"critical": "#d64545", "warning": "#b7791f", "info": "#3182ce", "healthy": "#2f9e62", "unknown": "#868e96"}
"""Color of each severity, with a contrast of 3 to white and to black."""
_LINES = ("#3182ce", "#d9730d", "#2f9e62", "#a855c7", "#d64545", "#868e96")
_WIDTH, _HEIGHT = 220.0, 56.0
_MOST_EVIDENCE = 8
_UNITS = {"_s": "s", "_bytes": "B", "_pct": "%"}


class Curve(Protocol):
    """As query.Series, which imports this module."""

    name: str
    step: list[int]
    mean: list[float]
    nonfinite: list[int]


def card(head: str, facts: Sequence[str], *parts: str) -> str:
    """head, parts: HTML; facts: text."""
    said = f": {escape(', '.join(facts))}" if facts else ""
    style = "border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:8px 12px;max-width:46em"
    return f'<div style="{style}"><div>{head}{said}</div>{"".join(parts)}</div>'


def link(text: str, address: str | None) -> str:
    """address: one of http or https; anything else is left out."""
    if address is None or not address.startswith(("http://", "https://")):
        return f"<b>{escape(text)}</b>"
    return f'<a href="{escape(address)}" target="_blank" rel="noopener" style="color:inherit"><b>{escape(text)}</b></a>'


def finding_html(heading: str, kind: str, message: str, fix: str, evidence: Mapping[str, object]) -> str:
    """The sentence, what to do, and behind a click the figures that it rests on. kind: a severity, or healthy, unknown."""
    color = _COLORS.get(kind, _COLORS["info"])
    advice = f"<br>Fix: {escape(fix)}" if fix else ""
    rows = [(name.replace("_", " "), text) for name, value in evidence.items() if (text := _fact(name, value))]
    details = f"<details><summary>Evidence</summary>{table_html((), rows[:_MOST_EVIDENCE])}</details>" if rows else ""
    style = f"border-left:4px solid {color};padding-left:8px;margin:6px 0"
    return f'<div style="{style}"><b>{escape(heading)}</b>: {escape(message)}{advice}{details}</div>'


def _fact(name: str, value: object) -> str:
    """Numbers and short texts; what is longer has a page."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return ""
    if isinstance(value, str):
        return value if 0 < len(value) <= 80 else ""
    return quantity(value, next((unit for end, unit in _UNITS.items() if name.endswith(end)), ""))


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Texts, escaped."""
    cells = [f"<tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr>"] if head else []
    cells += [f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows]
    return f'<table style="color:inherit;font:inherit">{"".join(cells)}</table>'


def curves_html(title: str, series: Sequence[Curve], names: Sequence[str] = ()) -> str:
    """A small chart of series over the same steps, with its lowest and highest value, and red marks where values are NaN or
    infinite; names: of the lines, where they are several. "" where nothing is finite."""
    finite = [value for one in series for value in one.mean if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    steps = [step for one in series if one.step for step in (one.step[0], one.step[-1])]
    paths = "".join(
        f'<path d="{_path(one, min(steps), max(steps), low, high)}" fill="none" stroke="{_LINES[at % len(_LINES)]}" '
        f'stroke-width="1.5" vector-effect="non-scaling-stroke"/>'
        for at, one in enumerate(series)
    )
    paths += "".join(
        f'<path d="{ticks}" stroke="{_COLORS["critical"]}" stroke-width="2"/>'
        for one in series
        if (ticks := _nonfinite(one, min(steps), max(steps)))
    )
    label = f"{title}: {figure(series[0].name, low)} to {figure(series[0].name, high)}, steps {min(steps):,} to {max(steps):,}"
    legend = "".join(
        f' <span style="color:{_LINES[at % len(_LINES)]}">■</span> {escape(name)}' for at, name in enumerate(names)
    )
    return (
        f'<figure style="display:inline-block;margin:4px 12px 4px 0"><svg role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" width="{_WIDTH:g}" height="{_HEIGHT:g}">{paths}</svg>'
        f'<figcaption style="font-size:85%">{escape(label)}{legend}</figcaption></figure>'
    )


def _path(series: Curve, first: int, last: int, low: float, high: float) -> str:
    """A gap where a value is not finite. Halves, because the difference of two large numbers may be infinite."""
    drawn, pen = [], "M"
    for step, value in zip(series.step, series.mean, strict=True):
        if not math.isfinite(value):
            pen = "M"
            continue
        x = _across(step, first, last)
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        drawn.append(f"{pen}{x:.1f},{2 + (_HEIGHT - 4) * (1 - share):.1f}")
        pen = "L"
    return "".join(drawn)


def _nonfinite(series: Curve, first: int, last: int) -> str:
    steps = (step for step, bad in zip(series.step, series.nonfinite, strict=True) if bad)
    return "".join(f"M{_across(step, first, last):.1f},{_HEIGHT:g}v-4" for step in steps)


def _across(step: int, first: int, last: int) -> float:
    return _WIDTH * (step - first) / max(1, last - first)
