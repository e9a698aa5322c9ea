"""What a GradScaler did in a step, as its two series show it."""

from __future__ import annotations

from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = ["READS", "skips_in_a_row", "was_skipped"]

READS = (Series("amp/scale", merge="min"), Series("amp/skipped", merge="max"))


def skips_in_a_row(window: Window, kind: str, step: int, enough: int) -> int:
    """How many non-finite steps up to this one, in a row, the GradScaler is known to have skipped; 0 when this one was
    not.

    Counts to enough + 1 at most.
    """
    count = 0
    while count <= enough and window.nonfinite_at(kind, step) is not None and was_skipped(window, step, later=0):
        count += 1
        step -= 1
    return count


def was_skipped(window: Window, step: int, *, later: int) -> bool:
    """Whether the GradScaler skipped this step: its counter rose or its scale fell in this step, or up to `later` steps
    on."""
    for name, sign in (("amp/skipped", 1.0), ("amp/scale", -1.0)):
        series = window.by_step.get(name)
        if series is None:
            continue
        # Not `seen`: what came in the same frame counts, whatever the order of judging.
        places = [place for place, at in enumerate(series.steps) if step <= at <= step + later]
        for place in places:
            before = series.values[place - 1] if place else (0.0 if sign > 0 else series.values[place])
            if sign * (series.values[place] - before) > 0:
                return True
    return False
