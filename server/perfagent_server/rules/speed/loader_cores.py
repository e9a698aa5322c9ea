"""How many loader workers a machine of the run has, and for how many it has cores."""

from __future__ import annotations

import math
from typing import NamedTuple

from perfagent_server.rules.rule import Series
from perfagent_server.rules.speed.cpu_load import BUSY, CORES, OWN
from perfagent_server.rules.window import Window

__all__ = ["READS", "WORKERS", "LoaderCores", "loader_cores", "take_turns"]

WORKERS = "process/workers"
READS = (Series(WORKERS, keep=2, axis="time"), OWN, BUSY, CORES)
"""What a rule must read for loader_cores() and take_turns()."""

_NEWEST_S, _FULL_PCT = 30.0, 90.0


class LoaderCores(NamedTuple):
    """A typical machine of the run. workers: of all its ranks."""

    cores: float
    ranks: int
    workers: float

    @property
    def of_rank(self) -> int:
        """Workers of one rank."""
        return round(self.workers / self.ranks)

    @property
    def free(self) -> int:
        """Workers for which each rank has a core left; none where the ranks alone need all."""
        return max(0, int((self.cores - self.ranks) // self.ranks))

    def wanted(self, wait: float) -> int:
        """How many workers a rank needs so that none of its step is a wait, of those for which there are cores. Loading
        in the training process (no workers) takes what the step waits; workers that deliver too slowly must be so many
        more. wait: share of the step, 0 to 1."""
        rest = max(0.05, 1.0 - wait)
        times = round(wait / rest if self.of_rank < 1 else self.of_rank / rest, 6)  # 10.000000001 is 10
        return min(self.free, math.ceil(times) + (self.of_rank < 1))


def loader_cores(window: Window) -> LoaderCores | None:
    """None where the cores are not known, or no process tells of its workers: one that has none sends no number."""
    allowed, workers = window.readings(CORES.name).newest(), window.readings(WORKERS).newest()
    if not allowed or (workers is None and OWN.name not in window.by_time):
        return None
    ranks = max(1, round(window.world_size / max(1, len(window.readings(BUSY.name).ranks))))
    return LoaderCores(allowed, ranks, (workers or 0.0) * ranks)


def take_turns(window: Window, machine: LoaderCores, until: float) -> bool:
    """Whether there are more workers than cores and no core idles, so that a wait for batches is one for cores. Workers
    that wait for a disk or the network are not too many. `until`: clock of the nodes."""
    busy_pct = window.readings(BUSY.name).mean(until - _NEWEST_S, until)
    return machine.workers > machine.cores and busy_pct is not None and busy_pct >= _FULL_PCT
