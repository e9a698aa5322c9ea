"""Which steps of which run are compared: `RUN` or `RUN:FROM-TO`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from perfagent.errors import WireError

__all__ = ["Window", "window_of"]

_WINDOW = re.compile(r"(?P<run>.+):(?P<begin>\d{0,18})-(?P<end>\d{0,18})")


@dataclass(frozen=True, slots=True)
class Window:
    """run: its id or name. begin, end: first and last step, None for the run's own."""

    run: str
    begin: int | None = None
    end: int | None = None


def window_of(text: str) -> Window:
    """Raises WireError for a window that ends before it begins. A colon may be in a run's name: only digits and a dash
    after the last one make a window."""
    found = _WINDOW.fullmatch(text)
    if found is None or not (found["begin"] or found["end"]):
        return Window(text)
    begin, end = (int(found[name]) if found[name] else None for name in ("begin", "end"))
    if begin is not None and end is not None and end < begin:
        raise WireError(
            f"the window of {text!r} ends before it begins; write RUN:FROM-TO, such as {found['run']}:100-200"
        )
    return Window(found["run"], begin, end)
