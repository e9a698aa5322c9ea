"""Whose work keeps the cores of a node busy: that of the run's own processes, or that of others."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perfagent_server.rules.rule import Series
from perfagent_server.rules.window import Window

__all__ = [
    "BUSY", "CORES", "OWN", "PRESSURE", "READS", "THROTTLED", "CpuLoad", "cpu_load", "fullest", "is_crowded",
    "ranks_of_nodes",
]  # fmt: skip

_KEPT_S = 180  # for a minute of stepping in it, whatever pauses there are between the steps
PRESSURE = Series("host/cpu_pressure_pct", keep=_KEPT_S, axis="time", ranks="apart")
THROTTLED = Series("host/cpu_throttled_pct", keep=_KEPT_S, axis="time", ranks="apart")
BUSY = Series("host/cpu_pct", keep=150, axis="time", ranks="apart")
OWN = Series("process/cpu_pct", keep=150, axis="time", ranks="apart")
_WORKERS = Series("process/workers_cpu_pct", keep=30, axis="time", ranks="apart")
CORES = Series("host/cores", keep=2, axis="time")
READS = (BUSY, OWN, _WORKERS, CORES)
"""What a rule must read for cpu_load()."""


_NEWEST_S, _MUCH = 30.0, 0.2


@dataclass(frozen=True, slots=True)
class CpuLoad:
    """In cores, over some seconds. cores: that the run may use; own: what its processes used, loader workers included;
    workers: what those used; busy: what all programs of the machine used, of the same number of cores; ranks: of the run
    on this node."""

    cores: float
    own: float
    workers: float
    busy: float
    ranks: tuple[int, ...]

    @property
    def others(self) -> float:
        """Of programs that are not the run's. Where the run may use only some of the machine's cores this is no more than
        an estimate, since others' load is told of all of them."""
        return max(0.0, self.busy - self.own)

    @property
    def is_own(self) -> bool:
        """Whether nearly all of the load is the run's."""
        return self.own >= 0.75 * max(self.busy, self.own)


def ranks_of_nodes(window: Window) -> list[tuple[int, tuple[int, ...]]]:
    """The rank that reports for its node, and all ranks of that node: launchers number them in a row."""
    speakers, known = window.readings(BUSY.name).ranks, window.readings(OWN.name).ranks
    nodes = zip(speakers, [*speakers[1:], math.inf], strict=False)
    return [(first, tuple(rank for rank in known if first <= rank < end)) for first, end in nodes]


def cpu_load(window: Window, node: tuple[int, tuple[int, ...]], since: float, until: float) -> CpuLoad | None:
    """Between two times (Unix seconds, clock of the node); None if too little is known."""
    speaker, ranks = node
    allowed = window.readings(CORES.name).newest()
    busy_pct = _mean(window, BUSY.name, speaker, since, until)
    own_pct = [_mean(window, OWN.name, rank, since, until) for rank in ranks]
    if not allowed or busy_pct is None or not ranks or None in own_pct:
        return None
    workers = sum(_mean(window, _WORKERS.name, rank, since, until) or 0.0 for rank in ranks) / 100
    own = sum(one or 0.0 for one in own_pct) / 100 + workers
    return CpuLoad(allowed, own, workers, busy_pct / 100 * allowed, ranks)


def is_crowded(window: Window, until: float) -> bool:
    """Whether other programs used a good part of some node's cores in the seconds before. `until`: clock of the nodes."""
    load = fullest(window, until)
    return load is not None and load.others >= _MUCH * load.cores


def fullest(window: Window, until: float) -> CpuLoad | None:
    """Of the node of whose cores other programs took most in the seconds before."""
    loads = (cpu_load(window, node, until - _NEWEST_S, until) for node in ranks_of_nodes(window))
    return max((load for load in loads if load is not None), key=lambda load: load.others / load.cores, default=None)


def _mean(window: Window, name: str, rank: int, since: float, until: float) -> float | None:
    """Of the readings while the run made steps; of a sampler that is slower than this span, its newest before the end."""
    seconds = window.readings(name).seconds(rank)
    inside = (seconds.second >= since) & (seconds.second <= until) & seconds.stepping
    if inside.any():
        return float(seconds.total[inside].sum() / seconds.count[inside].sum())
    before = np.flatnonzero(seconds.second <= until)
    if name != _WORKERS.name or not len(before):
        return None
    return float(seconds.total[before[-1]] / seconds.count[before[-1]])
