"""Texts of the server as elements: `names in backticks` as code, numbered advice as a list."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from dash import html

if TYPE_CHECKING:
    from dash.development.base_component import Component

__all__ = ["advice", "prose"]

_NUMBERED = re.compile(r"(?:^|\s)(?=\d{1,2}[.)]\s+[A-Z\u4e00-\u9fff])")


def prose(text: str) -> list[Component | str]:
    return [html.Code(part) if place % 2 else part for place, part in enumerate(re.split(r"`([^`]+)`", text)) if part]


def advice(fix: str) -> Component | None:
    """What to do: a sentence, or steps, where it is lines or numbered ("1. Look ... 2. Halve ...")."""
    lines = [line.strip() for line in fix.splitlines() if line.strip()]
    if len(lines) == 1 and lines[0].startswith("1"):
        lines = [part.strip() for part in _NUMBERED.split(lines[0]) if part.strip()]
    if not lines:
        return None
    if len(lines) == 1:
        return html.P(prose(lines[0]))
    return html.Ol([html.Li(prose(re.sub(r"^\d{1,2}[.)]\s*", "", line))) for line in lines])
