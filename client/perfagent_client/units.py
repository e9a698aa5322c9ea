"""Figures as people read them: 4.41 GiB, 42.3 ms, 31 %. By the unit that the catalogue of metrics gives each name.
Pure."""

from __future__ import annotations

import math

from perfagent.wire import metric

__all__ = ["duration", "figure", "is_share", "quantity", "short", "size"]

_ALL_DIGITS = ("loss", "lr")
_NOISE_PCT = 0.1  # what the agent costs is a difference of two measurements, and may come out below zero
_BINARY = (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
_DECIMAL = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


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
    known = metric(name).meaning != "logged by the training script"
    return known and (name in ("mfu", "cuda/fragmentation") or rest == "share" or rest.endswith("_share"))


def quantity(value: float, unit: str) -> str:
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if unit in ("B", "B/s"):
        return size(value) + unit.removeprefix("B")
    if unit == "s":
        return duration(value)
    if unit == "FLOP/s":
        prefix, divisor = next((one for one in _DECIMAL if abs(value) >= one[1]), ("", 1.0))
        return f"{short(value / divisor)} {prefix}FLOP/s"
    return f"{short(value)} {unit}" if unit else f"{value:.6g}"


def size(value: float) -> str:
    unit, divisor = next((one for one in _BINARY if abs(value) >= one[1]), ("B", 1))
    return f"{short(value / divisor)} {unit}"


def duration(seconds: float) -> str:
    """42.3 ms, 1.25 s, 3 min 5 s, 2 h 10 min."""
    if seconds < 1e-3:
        return f"{short(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{short(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{short(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours:,} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def short(value: float, digits: int = 3) -> str:
    """So many digits, or all of those before the point."""
    return f"{value:,.0f}" if abs(value) >= 10**digits - 0.5 else f"{value:.{digits}g}"
