"""The smoothed loss of a run, its lowest points, and what was usual: kept value by value, in the plain state of a rule."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypedDict

from perfagent_server.rules.loss.loss_series import has_fallen

__all__ = ["Lowest", "SmoothedLoss"]

_SMOOTHED = 50  # values
_CLIPPED_AT = 5.0  # spreads: one bad batch moves the mean by a tenth of a spread
_BEGUN = 20  # values that the mean begins with
_BLOCK = 50  # values that one lowest point stands for
_EVERY = 20  # values between two samples of how far the loss is up
_SAMPLES = 100
_FEWEST_SAMPLES = 30
_YOUNG = 200  # values


class Lowest(TypedDict):
    """The lowest point of a block of 50 values. lr: the lowest learning rate in it; peak: the highest before it; spread:
    that of single values; step, count: when it was."""

    values: int
    low: float
    lr: float | None
    peak: float
    spread: float
    step: int
    count: int


class SmoothedLoss:
    """state: a dictionary that the rule's window keeps; empty at first.

    The mean is exponential over the newest 50 values, each at most five spreads away from it. count: how many values
    came; early: the first 16; spread: how far single values are from the mean, as a standard deviation.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        if not state:
            state.update(count=0, mean=0.0, deviation=0.0, early=[], blocks=[], rises=[], best=[])
        self.state = state
        self.count: int = state["count"]
        self.mean: float = state["mean"]
        self.early: list[float] = state["early"]
        self.blocks: list[Lowest] = state["blocks"]

    @property
    def first(self) -> float:
        """The first value: that of the untrained model, or of the one that the run went on with."""
        return self.early[0]

    @property
    def all_blocks(self) -> list[Lowest]:
        """Those that are kept, and the lowest before them."""
        return [*self.state["best"], *self.blocks]

    def take(self, value: float) -> None:
        self.count += 1
        if self.count < _BEGUN:
            self.early.append(value)
        elif self.count == _BEGUN:
            newest = sorted([*self.early[_BEGUN // 2 :], value])
            self.mean = newest[len(newest) // 2]
            off = sorted(abs(one - self.mean) for one in newest)
            self.state["deviation"] = max(1e-12, off[len(off) // 2])
            del self.early[16:]
        else:
            most = _CLIPPED_AT * self.state["deviation"]
            off_mean = max(-most, min(most, value - self.mean))
            self.state["deviation"] += (0.05 if self.count < 3 * _BEGUN else 0.02) * (
                abs(off_mean) - self.state["deviation"]
            )
            self.mean += max(2 / (_SMOOTHED + 1), 1 / (self.count - _BEGUN / 2)) * off_mean
        self.state.update(count=self.count, mean=self.mean)

    def note_lowest(self, step: int, lr: float | None, peak: float, blocks: int) -> None:
        """Keeps the lowest points of the newest blocks. lr, peak: the learning rate, and the highest so far."""
        if self.count < _BEGUN:
            return
        known, mean = self.blocks, self.mean
        if not known or known[-1]["values"] >= _BLOCK:
            known.append(Lowest(values=0, low=float("inf"), lr=lr, peak=peak, spread=0.0, step=step, count=self.count))
            best = self.lowest([*self.state["best"], *known[:-blocks]])
            self.state["best"] = [] if best is None else [best]
            del known[:-blocks]
        block = known[-1]
        block["values"] += 1
        if lr is not None:
            block["lr"] = lr if block["lr"] is None else min(block["lr"], lr)
        if mean <= block["low"]:
            block.update({"low": mean, "spread": 1.25 * self.state["deviation"], "step": step, "count": self.count})

    def lowest(self, blocks: Sequence[Lowest]) -> Lowest | None:
        return min(blocks, key=lambda block: block["low"], default=None)

    def note_rise(self, rise: float) -> None:
        """Samples how far the loss is above its lowest point."""
        if self.count % _EVERY == 0:
            self.state["rises"].append(rise)
            del self.state["rises"][:-_SAMPLES]

    def usual_rise(self, values: int, *, comes_back: bool) -> tuple[float, bool]:
        """The 95th percentile of the samples older than the newest so many values (from 100 to 300), and whether they are of
        600 values, enough to know. comes_back: at most that by which the loss came down again after one of them; else what
        rises for longer is usual itself."""
        recent = (max(100, min(300, values)) + _EVERY) // _EVERY
        older = sorted((rises := self.state["rises"])[:-recent])
        usual = older[int(0.95 * (len(older) - 1))] if older else 0.0
        if comes_back:
            later = [*itertools.accumulate(reversed(rises), min)][::-1]
            usual = min(usual, max((a - b for a, b in zip(rises[:-recent], later, strict=False)), default=0.0))
        return usual, len(older) >= _FEWEST_SAMPLES

    def has_settled(self, lowest: Lowest) -> bool:
        """Whether the loss came down as one that is minimised does: by a quarter, and ever more slowly."""
        if lowest["count"] < _YOUNG or not has_fallen(self.first, lowest["low"]):
            return False
        early = [one["low"] for one in self.blocks if one["count"] <= lowest["count"] / 3][-1:]
        level = early[0] if early else self.blocks[0]["low"]
        return self.first - level >= 1.5 * (level - lowest["low"])

    def highest_before(self, lowest: Lowest) -> float:
        """The highest of the lowest points before this one: from there it came down."""
        return max(one["low"] for one in [*self.blocks, lowest] if one["count"] <= lowest["count"])
