"""Runs as lines through their settings to their results (parallel coordinates, Inselberg 1985), and as points of one setting
against one result. Drawn as SVG: some tens of lines need no chart library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING
from urllib.parse import quote

from dash import html

from perfagent_dashboard.components.numbers import si

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["Axis", "parallel", "scatter"]

_GAP, _HEIGHT, _MARGIN = 150, 260, 44
_SCATTER = 260
_DECADES = 2  # of positive numbers: then an axis is logarithmic
_HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Okabe and Ito's, without black and yellow: they are seen on light and dark."""


@dataclass(frozen=True, slots=True)
class Axis:
    """values: one a run, numbers or words."""

    title: str
    values: Sequence[float | str]
    is_result: bool = False

    @property
    def numbers(self) -> list[float]:
        """Words by their place in the alphabet, and what spans decades by its logarithm."""
        if any(isinstance(value, str) for value in self.values):
            order = sorted({str(value) for value in self.values})
            return [float(order.index(str(value))) for value in self.values]
        known = [float(value) for value in self.values]
        if min(known) > 0 and max(known) / min(known) >= 10**_DECADES:
            return [math.log10(value) for value in known]
        return known

    def places(self) -> list[float]:
        """From 0, the lowest, to 1."""
        known = self.numbers
        low, span = min(known), max(known) - min(known)
        return [(value - low) / span if span else 0.5 for value in known]

    def label(self, run: int) -> str:
        value = self.values[run]
        return value if isinstance(value, str) else si(float(value))


def parallel(axes: Sequence[Axis], names: Sequence[str]) -> Component:
    width = _GAP * (len(axes) - 1) + 2 * _MARGIN + 60
    lines = []
    places = [axis.places() for axis in axes]

    def point(at: int, run: int) -> tuple[float, float]:
        return _MARGIN + 30 + at * _GAP, 30 + (1 - places[at][run]) * (_HEIGHT - 60)

    for run, name in enumerate(names):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (point(at, run) for at in range(len(axes))))
        look = f'fill="none" stroke="{_hue(run)}" stroke-width="2"'
        lines.append(f'<polyline points="{path}" {look}><title>{escape(name)}</title></polyline>')
    for at, axis in enumerate(axes):
        x = _MARGIN + 30 + at * _GAP
        lines.append(f'<line x1="{x}" x2="{x}" y1="30" y2="{_HEIGHT - 30}" stroke="#888" stroke-width="1"/>')
        lines.append(_text(x, 16, axis.title, bold=axis.is_result))
        labels = {round(point(at, run)[1]): axis.label(run) for run in range(len(names))}
        lines += [_text(x + 6, y + 4, label, anchor="start") for y, label in _apart(labels)]
    return _picture(lines, width, _HEIGHT, f"{' → '.join(axis.title for axis in axes)}")


def scatter(setting: Axis, result: Axis, names: Sequence[str]) -> Component | None:
    """None where the setting is a word: there is no between."""
    if any(isinstance(value, str) for value in setting.values):
        return None
    xs, ys = setting.places(), result.places()
    inner = _SCATTER - 2 * _MARGIN
    lines = [
        f'<circle cx="{_MARGIN + x * inner:.1f}" cy="{_MARGIN + (1 - y) * inner:.1f}" r="5" fill="{_hue(run)}">'
        f"<title>{escape(f'{names[run]}: {setting.label(run)}, {result.label(run)}')}</title></circle>"
        for run, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    low, high = xs.index(min(xs)), xs.index(max(xs))
    bottom, top = ys.index(min(ys)), ys.index(max(ys))
    lines += [
        _text(_MARGIN, _SCATTER - 24, setting.label(low)), _text(_SCATTER - _MARGIN, _SCATTER - 24, setting.label(high)),
        _text(_SCATTER / 2, _SCATTER - 8, setting.title), _text(4, _SCATTER - _MARGIN + 4, result.label(bottom), anchor="start"),
        _text(4, _MARGIN + 4, result.label(top), anchor="start"), _text(_SCATTER / 2, 18, result.title, bold=True),
    ]  # fmt: skip
    return html.Div(_picture(lines, _SCATTER, _SCATTER, f"{setting.title}, {result.title}"), className="card")


def _hue(run: int) -> str:
    return _HUES[run % len(_HUES)]


def _apart(labels: dict[int, str], least: int = 14) -> list[tuple[int, str]]:
    """Those that do not stand on each other."""
    kept: list[tuple[int, str]] = []
    for y, label in sorted(labels.items()):
        if not kept or y - kept[-1][0] >= least:
            kept.append((y, label))
    return kept


def _text(x: float, y: float, text: str, *, anchor: str = "middle", bold: bool = False) -> str:
    short = text if len(text) <= 22 else text[:21] + "…"
    weight = "600" if bold else "400"
    look = f'text-anchor="{anchor}" font-size="11" font-weight="{weight}" fill="#888"'
    return f'<text x="{x:.0f}" y="{y:.0f}" {look}>{escape(short)}</text>'


def _picture(lines: Sequence[str], width: float, height: float, told: str) -> Component:
    """An image: texts of a run's configuration cannot become elements of the page."""
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif">{"".join(lines)}</svg>'
    )
    return html.Img(src=f"data:image/svg+xml,{quote(svg)}", alt=told, width=str(int(width)), height=str(int(height)))
