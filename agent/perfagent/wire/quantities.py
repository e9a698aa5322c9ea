"""Formats quantities for people: 4.41 GiB, 42.3 ms, 31 %. The catalogue of metrics gives the unit of each name. Pure."""

from __future__ import annotations

import math

from perfagent.wire.metrics import metric

__all__ = [
    "duration", "figure", "is_share", "nonfinite", "prefixed", "quantity", "scaled_unit", "short", "size", "some",
    "spell_money",
]  # fmt: skip

_ALL_DIGITS = ("loss", "lr")
_LEAST_MONEY = 1e-4
_NOISE_PCT = 0.1  # what the agent costs is a difference of two measurements, and may come out below zero
_BINARY = (("PiB", 2.0**50), ("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 0.0))
_DECIMAL = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 0.0))
_TIMES = (("h", 7200.0, 3600.0), ("min", 120.0, 60.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3), ("µs", 0.0, 1e-6))
"""Unit, from which value on, and its seconds."""


def some(number: int, thing: str) -> str:
    """`1 frame`, `12,000 frames`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def figure(name: str, value: float) -> str:
    """The value of a metric, with its unit."""
    if is_share(name):
        return quantity(100 * value, "%")
    if name == "agent/overhead_pct" and value < _NOISE_PCT:
        return f"< {_NOISE_PCT} %"
    unit = metric(name).unit
    return f"{value:.4g}" if not unit and name not in _ALL_DIGITS and math.isfinite(value) else quantity(value, unit)


def is_share(name: str) -> bool:
    """Whether a value of that name is a part of 1, which is read as a percentage. Never of a name that a script
    logged."""
    group, _, rest = name.partition("/")
    if group in ("dead_share", "module_share"):
        return True
    return not metric(name).is_logged and (
        name in ("mfu", "cuda/fragmentation") or rest == "share" or rest.endswith("_share")
    )


def quantity(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return nonfinite(value)
    if unit in ("B", "B/s"):
        return size(value) + unit.removeprefix("B")
    if unit == "s":
        return duration(value)
    if unit == "FLOP/s":
        divisor, prefix = _largest(_DECIMAL, value)
        return f"{short(value / divisor)} {prefix}FLOP/s"
    return f"{short(value)} {unit}" if unit else f"{value:.6g}"


def nonfinite(value: float) -> str:
    return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"


def size(value: float) -> str:
    divisor, unit = _largest(_BINARY, value)
    return f"{short(value / divisor)} {unit}"


def duration(seconds: float) -> str:
    """42.3 ms, 1.25 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 120:
        divisor, unit = scaled_unit("step_time_s", abs(seconds))
        return f"{short(seconds / divisor)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours:,} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def short(value: float, digits: int = 3) -> str:
    """So many digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"


def prefixed(value: float) -> str:
    """Three digits, their zeros too: 51.8k, 2.10, 0.0123, 3.00e-5; whole numbers below 1000 as they are."""
    if not math.isfinite(value):
        return nonfinite(value)
    if abs(value) >= 1e18 or 0 < abs(value) < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-")
    divisor, prefix = _largest(_DECIMAL, value / 0.9995)
    return f"{value / divisor:#.3g}".removesuffix(".") + prefix if prefix or value % 1 else f"{value:.0f}"


def scaled_unit(name: str, largest: float) -> tuple[float, str]:
    """By what all values of a metric are divided, and the unit they have then. largest: of them, as a size."""
    unit = metric(name).unit
    if is_share(name):
        return 0.01, "%"
    if unit in ("B", "B/s"):
        divisor, prefix = _largest(_BINARY, largest)
        return divisor, prefix + unit.removeprefix("B")
    if unit == "FLOP/s":
        divisor, prefix = _largest(_DECIMAL, largest)
        return divisor, f"{prefix}FLOP/s"
    if unit == "s" and largest:
        return next((seconds, spelled) for spelled, from_, seconds in _TIMES if largest >= from_)
    return 1.0, unit


def _largest(units: tuple[tuple[str, float], ...], value: float) -> tuple[float, str]:
    return next((divisor or 1.0, unit) for unit, divisor in units if abs(value) >= divisor)


def spell_money(amount: float, currency: str) -> str:
    """3.10 EUR; of a small amount the two digits that say something: 0.0042 EUR."""
    if amount >= 0.1 or not amount:
        return f"{amount:,.2f} {currency}"
    return f"{amount:.2g} {currency}" if amount >= _LEAST_MONEY else f"under {_LEAST_MONEY:.4f} {currency}"
