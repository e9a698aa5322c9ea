"""Series over the ranks of their runs, step by step: minimum, maximum and the value that the catalogue makes of them.

A step leaves once every rank that reports has passed it. What waits for a slow rank is all that is looked at again;
what is known of a run is dropped when the run ends.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from perfagent.wire import metric, whole_of
from perfagent_server.live.columns import Floats, Ints, column, numbers, steps_and_times
from perfagent_server.live.page import LAGGED
from perfagent_server.live.samples import SAMPLES_PER_MESSAGE
from perfagent_server.live.subscription import Subscription
from perfagent_server.store.stored import Stored

__all__ = ["Bands", "over_ranks"]

_RANK_GRACE_S = 2.0  # how long a step waits for its slowest rank before the band goes on without it
_MOST_WAITING = 20_000  # values of a band that wait for a rank: of one that is silent for ever the newest are kept
_FIRST_GRACE_S = 1.5  # how long a new band waits to learn which ranks there are


class Bands:
    """The bands that the pages of a subscription want."""

    def __init__(self, subscription: Subscription) -> None:
        self._wants_run = subscription.wants_run
        self._wants_name = lru_cache(4096)(subscription.wants_name)
        self._wanted_whole = lru_cache(4096)(
            lambda name: whole if (whole := whole_of(name)) and subscription.wants_name(whole) else ""
        )
        self._of_runs: dict[str, dict[str, _Band]] = {}
        # (run, name) of bands that hold steps, in the order of their frames: pages draw in the order of a message
        self._waiting: dict[tuple[str, str], None] = {}
        self._ended: set[str] = set()

    @property
    def waits(self) -> bool:
        """Whether steps are held that may leave with no new frame."""
        return bool(self._waiting)

    def add(self, stored: Stored, now: float) -> None:
        if not self._wants_run(stored.run):
            return
        for group in stored.groups:
            names = [name for name in group.values if self._wants_name(name)]
            parts = [(name, whole) for name in group.values if (whole := self._wanted_whole(name))]
            if not (names or parts) or not group.rows:
                continue
            bands = self._of_runs.setdefault(stored.run, {})
            steps, times = steps_and_times(group)
            for name, whole in (*((name, "") for name in names), *parts):
                band = bands.get(whole or name)
                if band is None:
                    band = bands[whole or name] = _Band(now, of_parts=bool(whole))
                if whole and not band.of_parts:
                    continue  # a rank sends the value itself
                band.add(stored.attempt, stored.rank, steps, times, column(group, name), now)
                self._waiting[stored.run, whole or name] = None

    def take(self, now: float) -> bytes | None:
        """The message of the steps that may leave."""
        bands = []
        for run, name in list(self._waiting):
            band = self._of_runs[run][name]
            ready = band.take(name, now, at_once=run in self._ended)
            if ready is not None:
                bands.append({"run": run, "name": name, **ready})
            if not band.pieces:
                del self._waiting[run, name]
        for run in self._ended:
            self._of_runs.pop(run, None)
        self._ended.clear()
        if sum(len(band["step"]) for band in bands) > SAMPLES_PER_MESSAGE:
            return LAGGED
        return msgspec.json.encode({"bands": bands}) if bands else None

    def end(self, run: str) -> None:
        """The run has ended or is gone: what waits for a rank leaves with the next message, and the rest is dropped."""
        if run in self._of_runs:
            self._ended.add(run)

    def clear(self) -> None:
        self._of_runs, self._waiting, self._ended = {}, {}, set()


class _Band:
    """One name of one run over its ranks.

    of_parts: what ranks send are parts of the value: then every rank that ever reported is waited for.
    """

    def __init__(self, now: float, *, of_parts: bool = False) -> None:
        self.born = now
        self.of_parts = of_parts
        self.attempt = 0
        self.sent_step = -1
        self.reached: dict[int, tuple[int, float]] = {}  # rank -> (its last step, when it reported)
        self.pieces: list[tuple[Ints, Floats, Floats]] = []

    def add(self, attempt: int, rank: int, steps: Ints, times: Floats, values: Floats, now: float) -> None:
        if attempt < self.attempt:
            return
        if attempt > self.attempt:  # a resumed run may begin at an earlier step
            self.attempt, self.sent_step, self.pieces, self.reached = attempt, -1, [], {}
        self.reached[rank] = (max(int(steps[-1]), self.reached.get(rank, (-1, 0.0))[0]), now)
        self.pieces.append((steps, times, values))

    def take(self, name: str, now: float, *, at_once: bool = False) -> dict[str, Any] | None:
        """The steps that are complete, or None. at_once: all steps, for no rank comes any more."""
        if not self.pieces or (now - self.born < _FIRST_GRACE_S and not at_once):
            return None
        current = [step for step, seen in self.reached.values() if self.of_parts or now - seen < _RANK_GRACE_S]
        steps, times, values = (np.concatenate(parts) for parts in zip(*self.pieces, strict=True))
        reached = min(current) if current else max(step for step, _ in self.reached.values())
        limit = int(steps.max()) if at_once else reached
        fresh = steps > self.sent_step
        leaving = fresh & (steps <= limit)
        staying = fresh & ~leaving
        kept = np.flatnonzero(staying)[-_MOST_WAITING:]
        self.pieces = [(steps[kept], times[kept], values[kept])] if len(kept) else []
        if not leaving.any():
            return None
        self.sent_step = limit
        steps, times, values = steps[leaving], times[leaving], values[leaving]
        return (
            _over_parts(steps, times, values, len(current)) if self.of_parts else over_ranks(name, steps, times, values)
        )


def over_ranks(name: str, steps: Ints, times: Floats, values: Floats) -> dict[str, Any]:
    """Per step: min and max over ranks, "mean" as the catalogue puts ranks together; NaN where no rank has a finite
    value."""
    order = np.argsort(steps, kind="stable")
    steps, times, values = steps[order], times[order], values[order]
    unique, starts = np.unique(steps, return_index=True)
    finite = np.isfinite(values)
    count = np.add.reduceat(finite, starts, dtype=np.int64)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts)
    none = count == 0
    low[none] = high[none] = np.nan
    over = metric(name).over_ranks
    middle = {"sum": total, "max": high, "min": low}.get(over)
    if middle is None:
        middle = total / np.maximum(count, 1)
    middle = np.where(none, np.nan, middle)
    rows = np.diff(np.append(starts, len(steps)))
    return {
        "step": unique.tolist(), "time": np.maximum.reduceat(times, starts).tolist(), "min": numbers(low), "max": numbers(high),
        "mean": numbers(middle), "count": rows.tolist(), "nonfinite": (rows - count).tolist(),
    }  # fmt: skip


def _over_parts(steps: Ints, times: Floats, values: Floats, ranks: int) -> dict[str, Any] | None:
    """Per step: the root of the sum of what all ranks sent of it; steps that some rank has not sent are left out."""
    unique, index, rows = np.unique(steps, return_inverse=True, return_counts=True)
    with np.errstate(over="ignore"):
        root = np.sqrt(np.bincount(index, values))
    finite = np.isfinite(root)
    keep = (rows >= ranks) | ~finite
    if not keep.any():
        return None
    time = np.full(len(unique), -np.inf)
    np.maximum.at(time, index, times)
    shown = numbers(np.where(finite, root, np.nan)[keep])
    return {
        "step": unique[keep].tolist(), "time": time[keep].tolist(), "min": shown, "max": shown, "mean": shown,
        "count": [1] * len(shown), "nonfinite": (~finite[keep]).astype(int).tolist(),
    }  # fmt: skip
