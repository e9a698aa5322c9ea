"""checkpoint_anomaly: a save that failed, was damaged, or is far larger or slower than the others."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar

from perfagent.wire import Finding, Severity
from perfagent_server.rules.memory.saves import FILE_BYTES, SAVE_S, SAVED_BYTES, SAVES, follow_saves
from perfagent_server.rules.rule import Every, Life, Question, Rule, Series
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["CheckpointAnomaly"]

_FAILED = Series("checkpoint/failed", keep=16, merge="max")
_DAMAGED = Series("checkpoint/damaged", keep=4, merge="max")
_USUAL_OF = 16  # saves
_STATE = ("memory/parameters_bytes", "memory/optimizer_state_bytes", "memory/offloaded_bytes")


@dataclass(frozen=True, kw_only=True)
class CheckpointAnomaly(Rule):
    """A save that failed, or stands out from those before it or from what is trained.

    whole_times: views are saved with their whole tensor. The checkpoints of BigScience's tr1-13B were ten times too large
    for want of a clone. A jump begins a new growth: optimizers have their state after the first step.
    """

    far_times: float = 10.0
    more_s: float = 10.0
    more_mib: float = 64.0
    whole_times: float = 4.0
    fewest_saves: int = 3
    grown_times: float = 3.0
    growing_saves: int = 6
    damaged_for_s: float = 1800.0

    id: ClassVar[str] = "checkpoint_anomaly"
    severities = ("info", "warning", "critical")
    question = Question.WILL_IT_GO_ON
    after = ("checkpoint_stale",)
    reads = (
        Every(10.0),
        SAVES,
        SAVED_BYTES,
        FILE_BYTES,
        SAVE_S,
        _FAILED,
        _DAMAGED,
        *(Series(name, keep=2, axis="time", ranks="apart") for name in _STATE),
    )
    charts = ("phase/checkpoint_s",)
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        state = window.state_of(self, {})
        return (
            self._failed(window)
            or self._damaged(window, state)
            or self._large(window)
            or self._slow(window, state.setdefault("saves_of", {}))
            or self._growing(window)
        )

    def _failed(self, window: Window) -> Finding | None:
        failed, saved = window.series(_FAILED.name), window.series(SAVED_BYTES.name)
        if failed is None:
            return None
        good = saved.step if saved is not None and saved.step is not None else -1
        since = [step for step in failed.last_steps(_FAILED.keep) if step > good]
        if not since:
            return None
        return self.found(
            "warning" if len(since) == 1 else "critical",
            cause="failed",
            since_step=since[0],
            evidence={
                "failed_steps": since, "newest_failed_step": since[-1], "in_a_row": len(since) if len(since) > 1 else None,
                "newest_good_step": good if good >= 0 else None, "lost_steps": window.step - max(good, 0),
            },
        )  # fmt: skip

    def _damaged(self, window: Window, state: dict[str, Any]) -> Finding | None:
        damaged = window.series(_DAMAGED.name)
        if not (damaged and damaged.value) or window.now - state.setdefault("damaged", window.now) > self.damaged_for_s:
            return None
        evidence = {"damaged": round(damaged.value)}
        return self.found("warning", cause="damaged", since_step=damaged.step, evidence=evidence)

    def _large(self, window: Window) -> Finding | None:
        saved, written = window.series(SAVED_BYTES.name), window.series(FILE_BYTES.name)
        held = [window.by_time[name] for name in _STATE if name in window.by_time]
        whole = sum(readings.newest(rank) or 0.0 for readings in held for rank in readings.ranks)  # of all ranks
        of_state = max(self.whole_times * whole, whole + self.more_mib * 2**20) if whole else math.inf
        if saved is not None:
            *before, newest = saved.last(_USUAL_OF)
            if newest >= self._far_above(before):
                return self._larger(saved, "warning", whole, before)
            return self._larger(saved, "info", whole, []) if newest >= of_state else None
        # a script may write files of several kinds: one is told that is large for both reasons, and not the only one
        sizes = [] if written is None else written.last(_USUAL_OF)
        if written is None or min(sizes[-2:]) < max(self._far_above(sizes[:-2]), of_state):
            return None
        return self._larger(written, "warning", whole, sizes[:-2])

    def _far_above(self, before: list[float]) -> float:
        """What is far more than the saves before; infinite where those are too few."""
        usual = median(before) if len(before) >= self.fewest_saves else math.inf
        return max(self.far_times * usual, usual + self.more_mib * 2**20)

    def _larger(self, saved: StepSeries, severity: Severity, whole: float, before: list[float]) -> Finding:
        """before: the saves that it is compared with, none for the state."""
        newest = saved.last(1)[0]
        if before:
            usual = median(before)
            figures = {"times_usual": newest / usual, "usual_bytes": usual, "before": len(before)}
        else:
            figures = {"times_state": newest / whole}
        return self.found(
            severity,
            cause="large",
            since_step=saved.step,
            evidence={"bytes": newest, "state_bytes": whole or None, "step": saved.step, **figures},
        )  # fmt: skip

    def _slow(self, window: Window, state: dict[str, Any]) -> Finding | None:
        _, saves = follow_saves(window, state)
        beside = window.series(SAVE_S.name)
        rows = [(save.step, save.seconds) for save in saves if save.seconds > 0]
        if beside is not None:  # how long they really took, also those for which the training did not wait
            rows = list(zip(beside.last_steps(SAVE_S.keep), beside.last(SAVE_S.keep), strict=True))
        if len(rows) <= self.fewest_saves:
            return None
        step, newest = rows[-1]
        usual = median(seconds for _, seconds in rows[:-1])
        if newest < max(self.far_times * usual, usual + self.more_s):
            return None
        return self.found(
            "warning",
            since_step=step,
            evidence={
                "seconds": newest, "usual_s": usual, "times": newest / usual, "lost_s": newest - usual,
                "saves": len(rows), "before": len(rows) - 1, "step": step,
            },
        )  # fmt: skip

    def _growing(self, window: Window) -> Finding | None:
        for saved in filter(None, (window.series(SAVED_BYTES.name), window.series(FILE_BYTES.name))):
            sizes, saves = saved.last(saved.size), 1
            while saves < len(sizes) and sizes[-saves - 1] < sizes[-saves] < 2 * sizes[-saves - 1]:
                saves += 1
            first, newest = sizes[-saves], sizes[-1]
            if saves >= self.growing_saves and newest >= max(self.grown_times * first, first + self.more_mib * 2**20):
                grown = {"bytes": newest, "first_bytes": first, "saves": saves, "step": saved.step}
                return self.found("info", cause="growing", since_step=saved.step, evidence=grown)
        return None
