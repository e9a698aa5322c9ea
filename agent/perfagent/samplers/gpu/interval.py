"""Mean, minimum and maximum of what was read within an interval."""

from __future__ import annotations

__all__ = ["SPREAD", "Interval"]

SPREAD = {
    name: (f"{stem}_min_{unit}", f"{stem}_max_{unit}")
    for name, stem, unit in (
        ("utilization_pct", "utilization", "pct"),
        ("memory_used_bytes", "memory_used", "bytes"),
        ("power_w", "power", "w"),
        ("sm_clock_mhz", "sm_clock", "mhz"),
    )
}
"""What has a minimum and a maximum beside its mean: the unit stays last in the name."""


class Interval:
    """Collects readings of one device. spread: whether minima and maxima are sent too."""

    __slots__ = ("_readings", "_spread")

    def __init__(self, *, spread: bool) -> None:
        self._spread = spread
        self._readings: dict[str, list[float]] = {}

    def add(self, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._readings.setdefault(name, []).append(value)

    def take(self) -> dict[str, float]:
        """The interval's values; the next one begins."""
        values: dict[str, float] = {}
        for name, readings in self._readings.items():
            values[name] = sum(readings) / len(readings)
            if self._spread and name in SPREAD:
                values[SPREAD[name][0]], values[SPREAD[name][1]] = min(readings), max(readings)
        self._readings = {}
        return values
