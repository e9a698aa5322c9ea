"""Where the time of a run went, from the end of its first step on: seconds by phase, over all steps and over the newest
ten minutes, and the steps in which something else happened than training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BESIDE_TRAINING", "RECENT_S", "Spent", "WallTime"]

RECENT_S = 600.0
BESIDE_TRAINING = frozenset(("checkpoint", "eval", "rollout"))
"""Phases that make a step no measure for the others. A phase that the script named (`run.phase("plot")`) is one, too."""
_USUAL = frozenset(("data", "h2d", "forward", "backward", "optimizer", "comm", "other"))
_BUCKET_S = 10.0
_INTERRUPTED = 0.1  # of the step, from which on it is none for a baseline
_MOST_INTERRUPTED = 1024
_MOST_PHASES = 32


@dataclass(slots=True)
class Spent:
    """What some steps took together. wall_s: from the end of one step to the end of the last; seconds: by phase
    (`eval`, not `phase/eval_s`); often: in how many steps a phase took any time; longest_s: its longest step; stopped_s:
    between the attempts of the run."""

    wall_s: float = 0.0
    steps: int = 0
    stopped_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    often: dict[str, int] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)

    def share(self, *phases: str) -> float:
        """Of the wall time, 0 to 1."""
        spent = sum(self.seconds.get(phase, 0.0) for phase in phases)
        return min(1.0, spent / self.wall_s) if self.wall_s > 0 else 0.0

    def add(self, step_s: float, phases: Mapping[str, float]) -> None:
        self.wall_s += step_s
        self.steps += 1
        for phase, seconds in phases.items():
            if phase not in self.seconds and len(self.seconds) >= _MOST_PHASES:
                continue
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            self.often[phase] = self.often.get(phase, 0) + 1
            self.longest_s[phase] = max(self.longest_s.get(phase, 0.0), seconds)

    def join(self, other: Spent) -> None:
        self.wall_s += other.wall_s
        self.steps += other.steps
        self.stopped_s += other.stopped_s
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
            self.often[phase] = self.often.get(phase, 0) + other.often[phase]
            self.longest_s[phase] = max(self.longest_s.get(phase, 0.0), other.longest_s[phase])

    def plain(self) -> list[Any]:
        return [self.wall_s, self.steps, self.stopped_s, self.seconds, self.often, self.longest_s]


class WallTime:
    """Filled from one rank of the run: the first that times its steps. ended: when its newest step ended, by its own
    clock, Unix seconds."""

    def __init__(self) -> None:
        self.ended = -math.inf
        self._whole = Spent()
        self._recent: list[tuple[float, Spent]] = []  # start of ten seconds, oldest first
        self._interrupted: deque[int] = deque(maxlen=_MOST_INTERRUPTED)
        self._rank: int | None = None

    def take(
        self,
        rank: int,
        steps: Sequence[int],
        times: Sequence[float],
        took: Sequence[float],
        phases: Sequence[tuple[str, Sequence[float]]],
    ) -> None:
        """Rows of one group. took: step times in seconds; phases: with their seconds in each row."""
        if self._rank is None:
            self._rank = rank
        if rank != self._rank:
            return
        for at, (step, time, step_s) in enumerate(zip(steps, times, took, strict=True)):
            if not 0 < step_s < math.inf:
                continue
            spent = {phase: column[at] for phase, column in phases if 0 < column[at] < math.inf}
            self._whole.add(step_s, spent)
            self._recent_at(time).add(step_s, spent)
            beside = sum(seconds for phase, seconds in spent.items() if phase not in _USUAL)
            if beside > _INTERRUPTED * step_s:
                self._interrupted.append(step)
            if math.isfinite(time):
                self.ended = max(self.ended, time)

    def whole(self) -> Spent:
        """Of all steps of the run, attempts before this one included."""
        return self._whole

    def recent(self, seconds: float = RECENT_S) -> Spent:
        """Of the steps that ended in the newest seconds (at most RECENT_S), to ten seconds."""
        spent = Spent()
        newest = self._recent[-1][0] if self._recent else 0.0
        for start, one in self._recent:
            if start > newest - seconds:
                spent.join(one)
        return spent

    @property
    def interrupted(self) -> frozenset[int]:
        """The newest steps in which something else than training took a tenth of the time: an evaluation, a save."""
        return frozenset(self._interrupted)

    def was_interrupted(self, step: int) -> bool:
        """Whether `step` is one of `interrupted`. Of the newest steps, without a look at the others."""
        known = next((one for one in reversed(self._interrupted) if one <= step), None)
        return known == step

    def go_on_from(self, older: WallTime, started: float) -> None:
        """The run was started again: its time goes on, and between the two it stood still. started: server clock."""
        self._whole.join(older.whole())
        if math.isfinite(older.ended):
            self._whole.stopped_s += max(0.0, started - older.ended)

    def _recent_at(self, time: float) -> Spent:
        start = math.floor(time / _BUCKET_S) * _BUCKET_S if math.isfinite(time) else -math.inf
        if self._recent and start <= self._recent[-1][0]:  # clocks may jump back
            return self._recent[-1][1]
        self._recent.append((start, Spent()))
        while self._recent[0][0] <= start - RECENT_S:
            del self._recent[0]
        return self._recent[-1][1]

    def snapshot(self) -> list[Any]:
        recent = [[start, spent.plain()] for start, spent in self._recent]
        return [self.ended, self._rank, self._whole.plain(), recent, list(self._interrupted)]

    def restore(self, state: Sequence[Any]) -> None:
        self.ended, self._rank, whole, recent, interrupted = state
        self._whole = Spent(*whole)
        self._recent = [(start, Spent(*spent)) for start, spent in recent]
        self._interrupted.extend(interrupted)
