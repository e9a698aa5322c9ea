"""Formats numbers: three significant digits and one unit, as assets/lib/numbers.js does in the browser."""

from __future__ import annotations

import math
from typing import Any

from perfagent.wire import metric
from perfagent_client.units import duration, is_share, size
from perfagent_dashboard.words import say

__all__ = ["count", "number", "percent", "quantity", "si"]

_PREFIXES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_SHORT = {"tokens/s": "tok/s", "tensors": ""}
_SPELLED = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def number(value: Any) -> float | None:
    """A number of the API: what is absent stays None, the texts "NaN" and "Infinity" are values."""
    if isinstance(value, str):
        return _SPELLED.get(value)
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def si(value: float | None) -> str:
    """51.8k, 2.15, 0.0123, 3.00e-5."""
    if value is None:
        return say("na")
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "−Inf"
    magnitude = abs(value)
    if magnitude >= 999.5:
        prefix, divisor = next(one for one in _PREFIXES if magnitude >= one[1] * 0.9995)
        text = f"{value:.2e}" if magnitude >= 1e18 else f"{_digits(value / divisor)}{prefix}"
    elif 0 < magnitude < 1e-3:
        mantissa, _, exponent = f"{value:.2e}".partition("e")
        text = f"{mantissa}e{int(exponent)}"
    else:
        text = str(int(value)) if float(value).is_integer() else _digits(value)
    return text.replace("-", "−")


def _digits(value: float) -> str:
    """Three significant digits, their zeros too: 2.10."""
    whole = len(str(int(abs(value)))) if abs(value) >= 1 else 0
    if whole == 0:
        return f"{value:#.3g}"
    return f"{value:.{max(0, 3 - whole)}f}"


def quantity(name: str, value: float | None) -> tuple[str, str]:
    """The value of a metric as number and unit."""
    if value is None:
        return say("na"), ""
    unit = metric(name).unit
    if is_share(name):
        return percent(value), "%"
    if math.isfinite(value) and unit in ("s", "B", "B/s"):
        text = duration(value) if unit == "s" else size(value) + unit.removeprefix("B")
        first, _, rest = text.partition(" ")
        return first, rest
    return si(value), _SHORT.get(unit, unit)


def percent(share: float) -> str:
    """Of a part of 1, without the sign."""
    return f"{100 * share:.1f}" if 0 < share < 0.1 else f"{100 * share:.0f}"


def count(value: int) -> str:
    return f"{value:,}"
