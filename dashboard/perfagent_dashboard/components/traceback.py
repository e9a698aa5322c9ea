"""A traceback: its end first, because that says most, with the lines of the user's own code set off."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dash import html
from dash.development.base_component import Component

from perfagent_dashboard.words import say

__all__ = ["traceback_end", "traceback_text"]

_LAST = 12
_FRAME = re.compile(r'^\s*File "([^"]+)"')
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python|<frozen|<string>")


def traceback_end(lines: Sequence[str]) -> Component:
    """The last lines; all of them in a fold."""
    shown = [traceback_text(lines[-_LAST:])]
    if len(lines) > _LAST:
        shown.append(html.Details([html.Summary(say("whole_traceback", count=len(lines))), traceback_text(lines)]))
    return html.Div(shown)


def traceback_text(lines: Sequence[str]) -> Component:
    parts: list[Component] = []
    is_own = False
    for line in lines:
        frame = _FRAME.match(line)
        if frame is not None:
            is_own = _LIBRARY.search(frame[1]) is None
        elif not line.startswith(" "):
            is_own = False
        is_exception = bool(line) and not line[0].isspace() and not line.startswith("Traceback")
        parts.append(html.Span(f"{line}\n", className="own" if is_own else "raised" if is_exception else ""))
    return html.Pre(parts, className="console traceback", tabIndex="0")
