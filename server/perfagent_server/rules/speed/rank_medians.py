"""What is typical of each rank: medians over the newest steps, side by side."""

from __future__ import annotations

import numpy as np

from perfagent_server.rules.row_series import Floats
from perfagent_server.rules.window import Window

__all__ = ["rank_medians", "slowest_phase"]


def rank_medians(window: Window, names: tuple[str, ...], steps: int) -> tuple[list[int], list[Floats]]:
    """The ranks that have all of these series, and for each series a median over the newest `steps` steps up to
    window.at: float64 (ranks,). A rank has a series if it reported it in at least half of those steps."""
    found: list[dict[int, float]] = []
    for name in names:
        ranks, columns, values = window.by_rank.matrix(name, window.at)
        found.append(_medians(ranks, values[:, -steps:], min(steps, len(columns))))
    common = sorted(set.intersection(*(set(one) for one in found)))
    return common, [np.array([one[rank] for rank in common]) for one in found]


def _medians(ranks: list[int], values: Floats, steps: int) -> dict[int, float]:
    if not values.size:
        return {}  # the steps of these ranks are older than all that are kept
    ordered = np.sort(values, axis=1)  # NaN, a step without a value, comes last
    counts = np.count_nonzero(~np.isnan(values), axis=1)
    places = np.maximum(counts - 1, 0) // 2
    middles = ordered[np.arange(len(ordered)), places]
    return {
        rank: float(middle)
        for rank, middle, count in zip(ranks, middles, counts, strict=True)
        if count and 2 * count >= steps
    }


def slowest_phase(window: Window, rank: int, phases: tuple[str, ...], steps: int) -> tuple[str, float]:
    """The phase in which a rank spends most more than a typical one, and how much more in seconds; "" if none does."""
    most: tuple[str, float] = ("", 0.0)
    for phase in phases:
        ranks, medians = rank_medians(window, (f"phase/{phase}_s",), steps)
        if rank in ranks:
            values = medians[0]
            more = float(values[ranks.index(rank)] - np.sort(values)[(len(values) - 1) // 2])
            most = max(most, (phase, more), key=lambda one: one[1])
    return most
