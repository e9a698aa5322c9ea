"""What was typical of a series over time while the run made steps: pauses between them do not count."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from perfagent_server.rules.time_series import Seconds
from perfagent_server.rules.window import Window

__all__ = ["Typical", "while_stepping", "while_stepping_by_rank"]

_SLOWEST_SAMPLER_S = 5.0  # a reading stands for no more than this


class Typical(NamedTuple):
    """mean: of readings; over_s: seconds of stepping that they cover."""

    mean: float
    over_s: float
    readings: float


def while_stepping(window: Window, name: str, for_s: float) -> Typical | None:
    """Over the newest for_s seconds in which steps were made; None if there are fewer, or the series is absent."""
    return _typical(window.readings(name).seconds(), for_s)


def while_stepping_by_rank(window: Window, name: str, for_s: float) -> dict[int, Typical]:
    """The same of a series that is kept with ranks apart: those of which so many seconds are known."""
    series = window.readings(name)
    found = {rank: _typical(series.seconds(rank), for_s) for rank in series.ranks}
    return {rank: one for rank, one in found.items() if one is not None}


def _typical(readings: Seconds, for_s: float) -> Typical | None:
    lasted = np.minimum(np.diff(readings.second, append=np.inf), _SLOWEST_SAMPLER_S)
    lasted[-1:] = 1.0
    covered = np.cumsum(np.where(readings.stepping, lasted, 0.0)[::-1])
    length = int(np.searchsorted(covered, for_s)) + 1
    if length > len(covered):
        return None
    newest = readings.stepping[-length:]
    count = float(readings.count[-length:][newest].sum())
    return Typical(float(readings.total[-length:][newest].sum()) / count, float(covered[length - 1]), count)
