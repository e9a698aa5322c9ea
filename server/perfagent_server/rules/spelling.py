"""Writes quantities as people do."""

from __future__ import annotations

__all__ = ["spell_bytes", "spell_number", "spell_pct", "spell_s", "spell_span"]


def spell_s(seconds: float) -> str:
    """A duration as people write it: 50 ms, 1.25 s, 180 µs."""
    rounded = abs(float(f"{seconds:.3g}"))  # first, or 0.9996 s are 1000 ms
    if rounded >= 1:
        return f"{_three_digits(seconds)} s"
    return f"{_three_digits(1e3 * seconds)} ms" if rounded >= 0.001 else f"{_three_digits(1e6 * seconds)} µs"


def spell_span(seconds: float, days: str = "{:.0f} days") -> str:
    """A duration of any length, with two digits from a minute and a half on: 50 ms, 40 s, 3.5 min, 12 h, 4 days."""
    if seconds < 90:
        return spell_s(seconds)
    if seconds < 90 * 60:
        return f"{seconds / 60:.2g} min"
    return f"{seconds / 3600:.2g} h" if seconds < 48 * 3600 else days.format(seconds / 86400)


def spell_bytes(size: float) -> str:
    """A size in the largest unit that gives a number of at least one: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        shown = _three_digits(size)
        if abs(float(shown)) < 1024:
            return f"{shown} {unit}"
        size /= 1024
    return f"{_three_digits(size)} TiB"


def spell_number(value: float) -> str:
    """A loss, a scale or a norm: 12,345, 2.303, 1.2e-05."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def spell_pct(percent: float, digits: int = 3) -> str:
    """100 %, 31.2 %, 0.04 %."""
    is_whole = abs(percent) >= 10**digits - 0.5  # then all digits before the point are shown: never 1e+03 %
    return f"{percent:.0f} %" if is_whole else f"{percent:.{digits}g} %"


def _three_digits(value: float) -> str:
    """Or as many as stand before the point: never 1e+03."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"
