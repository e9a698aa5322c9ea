"""Numbers as the pages show them: three significant digits and one unit, as assets/lib/numbers.js does in the browser."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

from perfagent.errors import WireError
from perfagent.wire import from_json, metric
from perfagent.wire.quantities import figure, is_share, prefixed
from perfagent_dashboard.words import say

__all__ = ["filled", "number", "percent", "quantity", "si"]

_SHORT = {"tokens/s": "tok/s", "tensors": ""}


def number(value: Any) -> float | None:
    """A number of the API: what is absent stays None, the texts "NaN" and "Infinity" are values."""
    with contextlib.suppress(WireError):
        return from_json(value)
    return None


def filled(fields: Iterable[tuple[str, Any]]) -> dict[str, float]:
    """Of number fields, (name, value) each, those that somebody has filled in."""
    return {name: float(value) for name, value in fields if value not in (None, "")}


def si(value: float | None) -> str:
    """51.8k, 2.15, 0.0123, 3.00e-5."""
    return say("na") if value is None else prefixed(value).replace("-", "−")


def quantity(name: str, value: float | None) -> tuple[str, str]:
    """The value of a metric as number and unit."""
    unit = metric(name).unit
    if value is None:
        return say("na"), ""
    if is_share(name):
        return percent(value), "%"
    if math.isfinite(value) and unit in ("s", "B", "B/s"):
        first, _, rest = figure(name, value).partition(" ")
        return first, rest
    return si(value), _SHORT.get(unit, unit)


def percent(share: float) -> str:
    """Of a part of 1, without the sign."""
    return f"{100 * share:.1f}" if 0 < share < 0.1 else f"{100 * share:.0f}"
