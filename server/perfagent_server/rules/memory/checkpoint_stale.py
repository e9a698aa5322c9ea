"""checkpoint_stale: the newest checkpoint is far older than those before it ever became."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from perfagent.wire import Finding
from perfagent_server.rules.memory.saves import SAVED_BYTES, SAVES, follow_saves
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["CheckpointStale"]

_FOLDER = "disk/checkpoint_free_bytes"


@dataclass(frozen=True, kw_only=True)
class CheckpointStale(Rule):
    """No save for much longer than usual. Where only the best model is saved, intervals are uneven by nature.

    Saves on another thread are known by their folder, perfagent's own when they are there. A run that began after step 0
    came from a checkpoint, so it has some.
    """

    stale_times: float = 2.0
    uneven_times: float = 3.0
    longest_times: float = 1.3
    uneven_at: float = 1.5
    fewest_saves: int = 3
    least_s: float = 300.0
    never_s: float = 7200.0
    never_steps: int = 100

    id = "checkpoint_stale"
    severities = ("info", "warning")
    question = Question.WILL_IT_GO_ON
    after = ("host_memory_leak",)
    reads = (
        Every(15.0),
        SAVES,
        SAVED_BYTES,
        Series(_FOLDER, keep=2, axis="time", ranks="apart"),
        Series("step_time_s", merge="median"),
    )
    charts = ("phase/checkpoint_s", "step_time_s")
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        if window.series("step_time_s") is None:
            return None
        count, saves = follow_saves(window, window.state_of(self, {}))
        if count == 0:
            return self._never(window)
        if len(saves) < self.fewest_saves:
            return None
        age_s, age_steps = window.now - saves[-1].time, window.step - saves[-1].step
        if age_s < self.least_s:
            return None
        steps = [later.step - earlier.step for earlier, later in pairwise(saves)]
        seconds = [later.time - earlier.time for earlier, later in pairwise(saves)]
        is_even = max(steps) <= self.uneven_at * min(steps)
        longest = self.longest_times if is_even else self.uneven_times
        if any(
            age <= max(self.stale_times * median(past), longest * max(past))
            for age, past in ((age_steps, steps), (age_s, seconds))
        ):
            return None
        return self.found(
            "warning" if is_even else "info",
            since_step=saves[-1].step,
            evidence={
                "age_steps": age_steps, "age_s": age_s, "usual_steps": median(steps), "usual_s": median(seconds),
                "longest_steps": max(steps), "newest_step": saves[-1].step, "saves": count,
                "at_most_steps": None if is_even else max(steps),
            },
        )  # fmt: skip

    def _never(self, window: Window) -> Finding | None:
        age_s, steps = window.now - window.started, window.step - window.start_step
        if age_s < self.never_s or steps < self.never_steps or window.start_step > 0 or _FOLDER in window.by_time:
            return None
        if "checkpoint" in window.wall.whole().often:
            return None
        return self.found(
            "info",
            cause="never",
            since_step=window.start_step,
            evidence={"age_steps": steps, "age_s": age_s, "saves": 0},
        )
