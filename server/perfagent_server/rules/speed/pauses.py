"""eval_bound, checkpoint_bound: what evaluations and saves cost, as a share of wall time over whole intervals between them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.wall_time import RECENT_S
from perfagent_server.rules.window import Window

__all__ = ["CheckpointBound", "EvalBound", "PauseRule", "Pauses", "note_rows", "pauses"]

_MOST_ROWS = 64
_LEAST_RECENT = 4
"""Fewer within the newest ten minutes: older ones count, too. A part of ten minutes is no share of an hour's interval."""
_LATE = 1.5
"""Times the longest interval so far, or the usual one."""
_FIRST_S = 60.0


@dataclass(frozen=True, slots=True)
class Pauses:
    """share: of wall time, 0 to 1; count: of pauses in it; each_s: of a usual one; every_steps, every_s: of a usual
    interval, from the end of a pause to the end of the next; over_s: of all intervals; is_settled: a warning may be built
    on them."""

    share: float
    count: int
    each_s: float
    longest_s: float
    every_steps: int
    every_s: float
    over_s: float
    is_settled: bool


def _reads(phase: str) -> tuple[Series | Every, ...]:
    """Judged where one ended; and now and then, since what stopped happening is told by no step."""
    took = Series("step_time_s", merge="median")
    return (Series(f"phase/{phase}_s", merge="median", judged=True), took, Every(15.0))


@dataclass(frozen=True, kw_only=True)
class PauseRule(Rule):
    """What the rules on evaluations and on saves share. phase: that it is about; counted: the name of their number."""

    info_pct: float = 10.0
    warning_pct: float = 33.0
    clear_at: float = 0.8  # of the threshold

    phase: ClassVar[str]
    counted: ClassVar[str]
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    life = Life(clear_s=30.0, restated=True)

    def judge(self, window: Window) -> Finding | None:
        found = pauses(window, self, self.phase)
        if found is None:
            return None
        share = 100 * found.share
        if share < self.info_pct * (self.clear_at if window.is_firing(self.id) else 1.0):
            return None
        return self.found(
            "warning" if share >= self.warning_pct and found.is_settled else "info",
            since_step=window.at,
            evidence={
                "share_pct": share, "half_as_often_saves_pct": share / 2, self.counted: found.count, "seconds_each": found.each_s,
                "longest_s": found.longest_s, "every_steps": found.every_steps, "every_s": found.every_s,
                "over_s": found.over_s, "share_of_run_pct": 100 * window.wall.whole().share(self.phase),
            },
            gain_pct=share / 2,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class EvalBound(PauseRule):
    id = "eval_bound"
    phase, counted = "eval", "evaluations"
    after = ("comm_bound",)
    reads = _reads("eval")
    charts = ("phase/eval_s", "step_time_s")


@dataclass(frozen=True, kw_only=True)
class CheckpointBound(PauseRule):
    """What the training waited for counts: a save that is written beside the training costs only the copy."""

    id = "checkpoint_bound"
    phase, counted = "checkpoint", "saves"
    after = ("h2d_bound",)
    reads = _reads("checkpoint")
    charts = ("phase/checkpoint_s", "step_time_s")


def pauses(window: Window, rule: Rule, phase: str) -> Pauses | None:
    """What a phase beside training costs; None where there were too few to tell.

    Time counts from the end of the first one, so each stands with the training before it: the only save of a run costs
    nothing, nor does a first evaluation that compiles. The longest counts as long as the one that comes after it in
    length: a single long step says nothing about the next hour. Of all of them and the newer half the smaller share
    counts. Nothing changes while one is under way, because no step ends meanwhile and time is counted up to the newest
    step.
    """
    rows = _noted(window, rule, f"phase/{phase}_s")
    rows = rows[-max(_LEAST_RECENT, sum(row[1] > rows[-1][1] - RECENT_S for row in rows)) :]
    if len(rows) < 2:
        return None
    gaps = [later[1] - earlier[1] for earlier, later in pairwise(rows)]
    steps = [later[0] - earlier[0] for earlier, later in pairwise(rows)]
    # They became rarer, or stopped. (Where one is judged, a frame may hold many steps after it.)
    late = window.at > rows[-1][0] and window.wall.ended - rows[-1][1] > _LATE * max(gaps)
    end = window.wall.ended if late else rows[-1][1]
    if min(gaps) < 0 or end <= rows[0][1] or not _is_typical(window, phase, steps):
        return None
    most_s = sorted(row[2] for row in rows)[-2]
    newer = rows[-max(_LEAST_RECENT, len(rows) // 2 + 1) :]
    return Pauses(
        share=min(_share(rows, end, most_s), _share(newer, end, most_s)),
        count=len(rows) - 1,
        each_s=median(row[2] for row in rows[1:]),
        longest_s=max(row[2] for row in rows),
        every_steps=round(median(steps)),
        every_s=(end - rows[0][1]) / len(gaps),
        over_s=end - rows[0][1],
        is_settled=len(rows) > 2,
    )


def _share(rows: list[list[Any]], end: float, most_s: float) -> float:
    """Of the time from the end of the first to `end`. most_s: so long each counts at most, and so long it then took."""
    counted: float = sum(min(row[2], most_s) for row in rows[1:])
    over_s: float = end - rows[0][1] - sum(max(0.0, row[2] - most_s) for row in rows[1:])
    return min(1.0, counted / max(over_s, counted))


def _noted(window: Window, rule: Rule, name: str) -> list[list[Any]]:
    """Step, time of its end and seconds of each that the attempt had so far: only of the newest does the series know
    the time once the server was started again."""
    rows: list[list[Any]] = window.state_of(rule, {"rows": []})["rows"]
    note_rows(rows, window.series(name))
    del rows[:-_MOST_ROWS]
    return rows


def note_rows(rows: list[list[Any]], track: StepSeries | None) -> None:
    """Adds the step, time of its end and value of each step of a series that is newer than all in `rows`."""
    newest = rows[-1][0] if rows else -1
    if track is None or track.step == newest:
        return
    for step, time, seconds in zip(track.steps[: track.seen], track.times[: track.seen], track.values, strict=False):
        if step > newest and 0 < seconds < math.inf and math.isfinite(time):
            rows.append([step, time, seconds])


def _is_typical(window: Window, phase: str, steps: list[int]) -> bool:
    """Whether they say what the next ones will cost. In the first minute only if they come at even intervals: many
    scripts save and evaluate at the steps 1, 2, 4, 8 ... Of two, both must have steps after them. steps: of the
    intervals."""
    whole = window.wall.whole()
    if whole.wall_s >= _FIRST_S:
        return len(steps) > 1 or whole.often.get(phase, 0) > 1
    return len(steps) > 2 and steps[-1] <= _LATE * median(steps)
