"""Where a step goes, as one bar: the shares of its phases side by side. Pure; the template draws it."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import PHASES, Timing, metric
from perfagent.wire.quantities import duration

__all__ = ["WIDTH", "Part", "step_bar"]

WIDTH = 1000.0
_SEEN = 0.002
"""A smaller share is left out of the bar; the table has it."""


@dataclass(frozen=True, slots=True)
class Part:
    """phase: one of wire.PHASES, or "named" for a phase that a script named; it decides the color."""

    phase: str
    title: str
    share_pct: float
    time: str
    x: float
    width: float


def step_bar(timing: Timing) -> list[Part]:
    """The phases in the order of a step, then those that the script named."""
    order = {phase: number for number, phase in enumerate(PHASES)}
    shares = [(name, share) for name, share in timing.phase_shares.items() if share >= _SEEN]
    shares.sort(key=lambda item: (order.get(item[0], len(order)), item[0]))
    parts, x = [], 0.0
    for name, share in shares:
        width = max(0.0, min(share * WIDTH, WIDTH - x))
        quantiles = timing.series.get(f"phase/{name}_s")
        title = metric(f"phase/{name}_s").title
        parts.append(
            Part(
                name if name in order else "named",
                name if title.startswith("phase/") else title,
                100 * share,
                "" if quantiles is None else duration(quantiles.mean),
                round(x, 1),
                round(width, 1),
            )
        )
        x += width
    return parts
