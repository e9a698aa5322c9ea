"""Growth of counters between two readings."""

from __future__ import annotations

import math
from collections.abc import Collection

__all__ = ["Rates"]


class Rates:
    """Counters by name, as they were read last."""

    __slots__ = ("_before",)

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def add(
        self, values: dict[str, float], name: str, count: float, at: float, scale: float = 1.0, most: float = math.inf
    ) -> None:
        """Sets values[name] to the growth a unit of `at` (seconds, steps), times `scale`, `most` at the most. A counter has none
        at its first reading, and none after it went back, as when a disk disappears or a driver is loaded anew."""
        before, self._before[name] = self._before.get(name), (at, count)
        if before is not None and at > before[0] and count >= before[1]:
            values[name] = min(most, scale * (count - before[1]) / (at - before[0]))

    def keep(self, names: Collection[str]) -> None:
        """Forgets all others."""
        self._before = {name: before for name, before in self._before.items() if name in names}
