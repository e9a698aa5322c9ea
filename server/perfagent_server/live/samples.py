"""Every sample that the pages of a subscription want, collected for their next message."""

from __future__ import annotations

from functools import lru_cache

import msgspec
import numpy as np

from perfagent_server.live.columns import Floats, Ints, column, numbers, steps_and_times
from perfagent_server.live.page import LAGGED
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.stored import Stored

__all__ = ["SAMPLES_PER_MESSAGE", "Samples"]

SAMPLES_PER_MESSAGE = 50_000  # more than that in a tick is no live update but a back-fill: the page fetches it


class Samples:
    waits = False
    """Nothing waits longer than to the next message."""

    def __init__(self, subscription: Subscription) -> None:
        self._wants_run = subscription.wants_run
        self._wants_name = lru_cache(4096)(subscription.wants_name)
        self._pieces: dict[tuple[str, int, str], list[tuple[Ints, Floats, Floats]]] = {}
        self._count = 0

    def add(self, stored: Stored, _now: float) -> None:
        if not self._wants_run(stored.run):
            return
        for group in stored.groups:
            names = [name for name in group.values if self._wants_name(name)]
            if not names or not group.rows:
                continue
            steps, times = steps_and_times(group)
            for name in names:
                pieces = self._pieces.setdefault((stored.run, stored.rank, name), [])
                pieces.append((steps, times, column(group, name)))
                self._count += len(steps)

    def take(self, _now: float) -> bytes | None:
        """The message of what was added since the last one."""
        if not self._pieces:
            return None
        collected, count = self._pieces, self._count
        self.clear()
        if count > SAMPLES_PER_MESSAGE:
            return LAGGED
        samples = []
        for (run, rank, name), pieces in collected.items():
            steps, times, values = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
            samples.append(
                {
                    "run": run,
                    "rank": rank,
                    "name": name,
                    "step": steps.tolist(),
                    "time": numbers(times),
                    "value": numbers(values),
                }
            )
        return msgspec.json.encode({"samples": samples})

    def end(self, run: str) -> None:
        """The run has ended: nothing is kept of a run here."""

    def clear(self) -> None:
        self._pieces, self._count = {}, 0
