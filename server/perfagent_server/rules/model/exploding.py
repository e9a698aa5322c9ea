"""Whether gradients exploded before a value was NaN or infinite: whatever operator then overflowed first, they are the cause."""

from __future__ import annotations

import math
from itertools import takewhile
from statistics import median

from perfagent_server.rules.window import Window

__all__ = ["exploded"]

_VALUES = 50
GROWN_TIMES = 1000.0


def exploded(window: Window, before: int) -> dict[str, float]:
    """{"norm_step", "norm_from", "norm_to"}: since which step, from what and to what the norm of the gradients grew before
    that step, and from there on was above all of the older half of the norms that were measured; empty if it did not."""
    track = window.by_step.get("grad/norm")
    if track is None:
        return {}
    known = zip(track.steps_before(before - 1, _VALUES), track.before(before - 1, _VALUES), strict=True)
    norms = [(step, norm) for step, norm in known if math.isfinite(norm)]
    older = [norm for _, norm in norms[: len(norms) // 2]]
    above = [*takewhile(lambda one: one[1] > max(older), reversed(norms))] if older else []
    if not above or not above[0][1] >= GROWN_TIMES * median(older) > 0:
        return {}
    return {"norm_step": above[-1][0], "norm_from": median(older), "norm_to": above[0][1]}
