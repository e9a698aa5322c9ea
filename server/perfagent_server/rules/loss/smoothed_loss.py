"""The smoothed loss of a run, its lowest points, and what was usual: kept value by value, in the plain state of a rule."""

from __future__ import annotations

from typing import Any

__all__ = ["SmoothedLoss", "samples_in"]

_SMOOTHED = 50  # values
_CLIPPED_AT = 5.0  # spreads: one bad batch moves the mean by a tenth of a spread
_BEGUN = 20  # values that the mean begins with
_BLOCK = 50  # values that one lowest point stands for
_EVERY = 20  # values between two samples of how far the loss is up
_SAMPLES = 100
_FIRST_MARK = 30


class SmoothedLoss:
    """state: a dictionary that the rule's window keeps; empty at first.

    The mean is exponential over the newest 50 values, each at most five spreads away from it. Lowest points are those
    of blocks of 50 values, each with the learning rate and the spread it had.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        if not state:
            state.update(
                count=0, mean=0.0, deviation=0.0, slope=0.0, early=[], highest=0.0, marks=[], blocks=[], rises=[]
            )
        self.state = state

    @property
    def count(self) -> int:
        """How many values came."""
        count: int = self.state["count"]
        return count

    @property
    def mean(self) -> float:
        mean: float = self.state["mean"]
        return mean

    @property
    def spread(self) -> float:
        """How far single values are from the mean, as a standard deviation."""
        spread: float = 1.25 * self.state["deviation"]
        return spread

    @property
    def first(self) -> float:
        """The first value: that of the untrained model, or of the one that the run went on with."""
        first: float = self.state["early"][0]
        return first

    @property
    def early(self) -> list[float]:
        """The first 16 values."""
        early: list[float] = self.state["early"][:16]
        return early

    @property
    def highest_early(self) -> float:
        """The highest of the first 20 values."""
        highest: float = self.state["highest"]
        return highest

    def take(self, value: float) -> None:
        state = self.state
        state["count"] += 1
        if state["count"] <= _BEGUN:
            state["early"].append(value)
            state["highest"] = max(state["early"])
            if state["count"] == _BEGUN:
                self._begin()
            return
        before, most = state["mean"], _CLIPPED_AT * state["deviation"]
        off = max(-most, min(most, value - before))
        state["deviation"] += (0.05 if state["count"] < 3 * _BEGUN else 0.02) * (abs(off) - state["deviation"])
        state["mean"] += max(2 / (_SMOOTHED + 1), 1 / (state["count"] - _BEGUN / 2)) * off
        state["slope"] += 0.02 * (state["mean"] - before - state["slope"])
        if state["count"] == _FIRST_MARK * 2 ** len(state["marks"]):
            state["marks"].append(state["mean"])

    def note_lowest(self, step: int, lr: float | None, peak: float, blocks: int) -> None:
        """Keeps the lowest points of the newest blocks. lr, peak: the learning rate, and the highest so far."""
        state, known = self.state, self.state["blocks"]
        if state["count"] < _BEGUN:
            return
        if not known or known[-1]["values"] >= _BLOCK:
            known.append({"values": 0, "low": float("inf"), "lr": lr, "peak": peak})
            del known[:-blocks]
        block = known[-1]
        block["values"] += 1
        if lr is not None:
            block["lr"] = lr if block["lr"] is None else min(block["lr"], lr)
        if state["mean"] <= block["low"]:
            block.update(
                low=state["mean"], spread=self.spread, step=step, count=state["count"],
                fall=max(0.0, -state["slope"]),
            )  # fmt: skip

    def lowest(self, blocks: list[dict[str, Any]]) -> dict[str, Any] | None:
        return min(blocks, key=lambda block: float(block["low"]), default=None)

    def note_rise(self, rise: float) -> None:
        """Samples how far the loss is above its lowest point."""
        if self.state["count"] % _EVERY == 0:
            self.state["rises"].append(rise)
            del self.state["rises"][:-_SAMPLES]

    def rises(self, values: int) -> list[float]:
        """Of the samples those older than the newest so many values, ascending."""
        rises = self.state["rises"]
        return sorted(rises[: max(0, len(rises) - (values + _EVERY) // _EVERY)])

    def level_at(self, count: int) -> float | None:
        """The mean when about a quarter to a half of so many values had come."""
        marks = self.state["marks"]
        place = max((place for place in range(len(marks)) if 2 * _FIRST_MARK * 2**place <= count), default=None)
        return None if place is None else marks[place]

    def _begin(self) -> None:
        state = self.state
        newest = sorted(state["early"][_BEGUN // 2 :])
        middle = len(newest) // 2
        state["mean"] = newest[middle]
        state["deviation"] = max(1e-12, sorted(abs(value - newest[middle]) for value in newest)[middle])
        del state["early"][16:]


def samples_in(values: int) -> int:
    """How many samples of rises so many values make."""
    return values // _EVERY
