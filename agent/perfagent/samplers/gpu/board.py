"""What boards of all vendors have in common: how one is lost, how its PCI address is compared, and what is sent of its
readings."""

from __future__ import annotations

__all__ = ["DeviceLost", "Interval", "place"]

_SPREAD = {
    "utilization_pct": "utilization_{}_pct", "memory_used_bytes": "memory_used_{}_bytes", "power_w": "power_{}_w",
    "sm_clock_mhz": "sm_clock_{}_mhz",
}  # fmt: skip
"""What has a minimum and a maximum beside its mean: the unit stays last in the name."""


class DeviceLost(Exception):  # noqa: N818 - what happened, as the driver says it
    """The device fell off the bus, needs a reset, or its driver is gone. The message is the driver's."""


def place(pci: str) -> str:
    """Domain, bus and device of a PCI address: the kernel writes 0000:3b:00.0, NVML 00000000:3B:00.0."""
    return pci.lower().partition(".")[0].lstrip("0")


class Interval:
    """Collects readings of one board. spread: whether minima and maxima are sent too."""

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
            if self._spread and name in _SPREAD:
                values[_SPREAD[name].format("min")], values[_SPREAD[name].format("max")] = min(readings), max(readings)
        self._readings = {}
        return values
