"""Where the time of a run went, from the end of its first step on: seconds by phase, over all steps and over the newest
ten minutes, and the steps in which something else happened than training."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["RECENT_S", "Spent", "WallTime"]

RECENT_S = 600.0
_USUAL = frozenset(("data", "h2d", "forward", "backward", "optimizer", "comm", "other"))
"""The phases of a usual step. A step with another phase (an evaluation, or `run.phase("plot")` of the script) says
nothing about the speed of the other steps."""
_BUCKET_S = 60.0
_INTERRUPTED = 0.1  # of the step, from which on it is none for a baseline
_MOST_INTERRUPTED = 512
_MOST_PHASES = 32


@dataclass(frozen=True, slots=True)
class Spent:
    """What some steps took together. wall_s: from the end of one step to the end of the last; seconds: by phase
    (`eval`, not `phase/eval_s`); often: in how many steps a phase took any time; longest_s: its longest step; stopped_s:
    between the attempts of the run."""

    wall_s: float = 0.0
    steps: int = 0
    stopped_s: float = 0.0
    seconds: Mapping[str, float] = field(default_factory=dict)
    often: Mapping[str, int] = field(default_factory=dict)
    longest_s: Mapping[str, float] = field(default_factory=dict)

    def share(self, *phases: str) -> float:
        """Of the wall time, 0 to 1."""
        spent = sum(self.seconds.get(phase, 0.0) for phase in phases)
        return min(1.0, spent / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def acts(self) -> bool:
        """Whether the model ran without gradients within most steps: it plays, or generates what it learns from."""
        return 2 * max(self.often.get("rollout", 0), self.often.get("eval", 0)) > self.steps


class _Tally:
    """Sums of some steps, in one array, because a run has ten of them: wall time and number of steps, then of each
    phase, by its place, its seconds, how often it was there, and its longest step."""

    __slots__ = ("sums",)

    def __init__(self, sums: Iterable[float] = (0.0, 0.0)) -> None:
        self.sums = array("d", sums)

    def add(self, wall_s: float, steps: float, phases: Iterable[tuple[int, float, float, float]]) -> None:
        """phases: place, seconds, in how many of these steps, and in the longest of them."""
        sums = self.sums
        sums[0] += wall_s
        sums[1] += steps
        for place, seconds, often, longest_s in phases:
            at = 2 + 3 * place
            if len(sums) < at + 3:
                sums.extend([0.0] * (at + 3 - len(sums)))
            sums[at] += seconds
            sums[at + 1] += often
            sums[at + 2] = max(sums[at + 2], longest_s)

    def join(self, other: _Tally) -> None:
        wall_s, steps, *phases = other.sums
        self.add(wall_s, steps, zip(range(len(phases) // 3), phases[::3], phases[1::3], phases[2::3], strict=True))

    def spent(self, phases: Sequence[str], stopped_s: float = 0.0) -> Spent:
        sums = self.sums
        seen = [(phase, 2 + 3 * place) for place, phase in enumerate(phases[: len(sums) // 3]) if sums[3 + 3 * place]]
        return Spent(
            wall_s=sums[0],
            steps=int(sums[1]),
            stopped_s=stopped_s,
            seconds={phase: sums[at] for phase, at in seen},
            often={phase: int(sums[at + 1]) for phase, at in seen},
            longest_s={phase: sums[at + 2] for phase, at in seen},
        )


class WallTime:
    """Filled from one rank of the run: the lowest that times its steps, since in many scripts only rank 0 saves and
    evaluates. rank: which that is; ended: when its newest step ended, by its own clock, Unix seconds."""

    def __init__(self) -> None:
        self.ended = -math.inf
        self._stopped_s, self._older_ended = 0.0, -math.inf  # when the attempt before ended, until this one has a step
        self._phases: list[str] = []
        self._whole = _Tally()
        self._recent: list[tuple[float, _Tally]] = []  # start of a minute, oldest first
        self._interrupted: deque[int] = deque(maxlen=_MOST_INTERRUPTED)
        self.rank: int | None = None
        self._newest = -1  # step that was counted; ranks may come in any order
        self._counted = -1  # up to which step a rank before this one was

    def take(
        self,
        rank: int,
        steps: Sequence[int],
        times: Sequence[float],
        took: Sequence[float],
        phases: Sequence[tuple[str, Sequence[float]]],
    ) -> None:
        """Rows of one group. took: step times in seconds; phases: with their seconds in each row."""
        if self.rank is None:
            self.rank = rank
        elif rank < self.rank:
            self.rank, self._counted = rank, self._newest
        if rank != self.rank:
            return
        columns = [(place, column) for phase, column in phases if (place := self._place(phase)) is not None]
        for at, (step, time, step_s) in enumerate(zip(steps, times, took, strict=True)):
            if not 0 < step_s < math.inf or step <= self._counted:
                continue
            self._newest = max(step, self._newest)
            if math.isfinite(self._older_ended) and math.isfinite(time):
                self._stopped_s += max(0.0, time - step_s - self._older_ended)
                self._older_ended = -math.inf
            spent = [(place, took_s, 1, took_s) for place, column in columns if 0 < (took_s := column[at]) < math.inf]
            self._whole.add(step_s, 1, spent)
            self._recent_at(time).add(step_s, 1, spent)
            beside = sum(seconds for place, seconds, *_ in spent if self._phases[place] not in _USUAL)
            if beside > _INTERRUPTED * step_s:
                self._interrupted.append(step)
            if math.isfinite(time):
                self.ended = max(self.ended, time)

    def take_rest(self, rank: int, steps: Sequence[int], phases: Sequence[tuple[str, Sequence[float]]]) -> None:
        """Rows without a step time: an evaluation or a save after the last step, which no later step holds."""
        if rank != self.rank:
            return
        for phase, column in phases:
            place = None if phase in _USUAL else self._place(phase)
            for step, seconds in zip(steps, column, strict=True):
                if place is not None and step >= self._newest and 0 < seconds < math.inf:
                    self._whole.add(seconds, 0, [(place, seconds, 1, seconds)])

    def whole(self) -> Spent:
        """Of all steps of the run, attempts before this one included."""
        return self._whole.spent(self._phases, self._stopped_s)

    def recent(self) -> Spent:
        """Of the steps that ended in the newest RECENT_S, to a minute."""
        joined = _Tally()
        newest = self._recent[-1][0] if self._recent else 0.0
        for start, one in self._recent:
            if start > newest - RECENT_S:
                joined.join(one)
        return joined.spent(self._phases)

    @property
    def interrupted(self) -> frozenset[int]:
        """The newest steps in which something else than training took a tenth of the time: an evaluation, a save."""
        return frozenset(self._interrupted)

    def was_interrupted(self, step: int) -> bool:
        """Whether `step` is one of `interrupted`. Of the newest steps, without a look at the others."""
        return step == next((one for one in reversed(self._interrupted) if one <= step), None)

    def go_on_from(self, older: WallTime, *, is_restart: bool = True) -> None:
        """The run was started again: its time goes on. is_restart: it had not finished, so until its first step ends it
        stands still."""
        self._phases, self._whole = [*older._phases], _Tally(older._whole.sums)
        self._stopped_s = older._stopped_s
        self._older_ended = max(older.ended, older._older_ended) if is_restart else -math.inf

    def _place(self, phase: str) -> int | None:
        if phase not in self._phases:
            if len(self._phases) >= _MOST_PHASES:
                return None
            self._phases.append(phase)
        return self._phases.index(phase)

    def _recent_at(self, time: float) -> _Tally:
        start = math.floor(time / _BUCKET_S) * _BUCKET_S if math.isfinite(time) else -math.inf
        if self._recent and start <= self._recent[-1][0]:  # clocks may jump back
            return self._recent[-1][1]
        self._recent.append((start, _Tally()))
        while len(self._recent) > 1 and self._recent[0][0] <= start - RECENT_S:  # alone it may be of no time at all
            del self._recent[0]
        return self._recent[-1][1]

    def snapshot(self) -> list[Any]:
        recent = [[start, tally.sums.tobytes()] for start, tally in self._recent]
        return [
            self.ended, self.rank, [self._newest, self._counted], [self._stopped_s, self._older_ended],
            self._phases, self._whole.sums.tobytes(),
            recent, list(self._interrupted),
        ]  # fmt: skip

    def restore(self, state: Sequence[Any]) -> None:
        self.ended, self.rank, counted, stopped, phases, whole, recent, interrupted = state
        self._newest, self._counted = counted
        self._stopped_s, self._older_ended = stopped
        self._phases, self._whole = list(phases), _Tally(array("d", whole))
        self._recent = [(start, _Tally(array("d", sums))) for start, sums in recent]
        self._interrupted.extend(interrupted)
