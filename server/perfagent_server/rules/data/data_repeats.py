"""data_repeats: the same batch comes more than once within an epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import Finding
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.rule import Life, Question, Rule, Series
from perfagent_server.rules.window import Window

__all__ = ["DataRepeats"]

_SERIES = ("batch/repeats", "batch/distinct")
_NEWEST_STEPS = 20


@dataclass(frozen=True, kw_only=True)
class DataRepeats(Rule):
    """The agent counts repeats by fingerprints. A training on a single batch is usual as a test (it must overfit), so
    that is a remark only, unless a loader is asked for each batch and always gives the same. Where about (n - 1) of n
    batches are repeats, n loader workers each read all of the data.
    """

    repeats: int = 3
    quiet_steps: int = 500
    most_workers_share: float = 0.45

    id: ClassVar[str] = "data_repeats"
    severities = ("info", "warning")
    question = Question.DOES_IT_LEARN
    after = ("unchanged_tensor",)
    reads = (
        *(reading_of(name, keep=4) for name in _SERIES),
        *(Series(name, merge="median") for name in ("step_time_s", "phase/data_s")),
    )
    charts = _SERIES
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        counts = readings(window, "batch/repeats", 1)
        if not counts or not counts[0]:
            return None  # nearly every run
        # repeats that were reported already; the newest count, and the steps of its first and its last rise
        state = window.state_of(self, {"told": 0.0, "count": 0.0, "first": window.step, "last": window.step})
        count = counts[0]
        if count < state["count"]:  # another process counts anew
            state.update(told=0.0, count=0.0)
        if count > state["count"]:
            state["count"], state["last"] = count, window.step
        if window.step - state["last"] > self.quiet_steps:
            state["told"], state["first"] = count, window.step
        found = count - state["told"]
        return self._finding(window, state["first"], found) if found >= self.repeats else None

    def _finding(self, window: Window, first: int, count: float) -> Finding:
        distinct = next(iter(readings(window, "batch/distinct", 1)), 0.0)
        alone = 0 < distinct <= 1
        share = count / (count + distinct) if distinct else 0.0
        cause = "one batch" if alone else "several times in a row" if share >= self.most_workers_share else ""
        return self.found(
            "info" if alone and not _is_fed(window) else "warning",
            cause=cause,
            since_step=first,
            evidence={"repeats": count, "distinct": distinct or None, "share_pct": 100 * share, "step": window.step},
        )


def _is_fed(window: Window) -> bool:
    """Whether the newest steps got their batches from a loader."""
    waits = window.series("phase/data_s")
    return waits is not None and bool(waits.value) and (waits.step or 0) >= window.step - _NEWEST_STEPS
