"""A small line without axes, as an image: who looks at it reads the shape, never a value. Gaps stay gaps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.components.attributes import hyphenated

__all__ = ["sparkline"]

_WIDTH, _HEIGHT = 120, 28


def sparkline(values: Sequence[float | None]) -> Component | None:
    """None where there is no line to draw. The line is a mask, so that it has the color of the theme."""
    finite = [value if value is not None and math.isfinite(value) else None for value in values]
    known = [value for value in finite if value is not None]
    if len(known) < 2:
        return None
    low, span = min(known), (max(known) - min(known)) or 1.0
    path, pen = "", "M"
    for at, value in enumerate(finite):
        if value is None:
            pen = "M"
            continue
        x = 2 + at / (len(finite) - 1) * (_WIDTH - 4)
        y = _HEIGHT - 3 - (value - low) / span * (_HEIGHT - 6)
        path += f"{pen}{x:.1f} {y:.1f}"
        pen = "L"
    svg = (
        f"%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {_WIDTH} {_HEIGHT}' preserveAspectRatio='none'%3E"
        f"%3Cpath d='{path}' fill='none' stroke='black' stroke-width='1.4' vector-effect='non-scaling-stroke'/%3E%3C/svg%3E"
    )
    image = f'url("data:image/svg+xml,{svg}")'
    style = {"maskImage": image, "WebkitMaskImage": image}
    return html.I(className="sparkline", style=style, **hyphenated(aria_hidden="true"))
