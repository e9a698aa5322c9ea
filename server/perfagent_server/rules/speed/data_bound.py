"""data_bound: the step waits for its batch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple

from perfagent.wire import Finding, Severity
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import Life, Question, Rule, Series, within
from perfagent_server.rules.speed import cpu_load, loader_cores, step_shares
from perfagent_server.rules.speed.step_shares import ON_DEVICE, UTILIZATION, busy_pct, means_over, seconds_by_step
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["DataBound"]

_FEWEST_GROUPS = 4
_KEPT = 64  # steps, in which an epoch that is worth a look begins twice
_LONG_TIMES, _FEWEST_LONG, _MOST_LONG_SHARE = 5.0, 2, 0.125
"""Long waits: as many times a usual step; how many of them are a habit, and in what part of the steps they still are single."""


@dataclass(frozen=True, kw_only=True)
class DataBound(Rule):
    """The step waits for its batch: the share of phase/data_s in step_time_s, medians over ranks.

    A few long waits (the first batch of an epoch, a busy machine) make a mean that says nothing of a usual step, so
    medians count. The workers of a slow loader deliver together, and one step then waits for all of them: hence groups
    of as many steps as there are workers. Where long waits come again, as where each epoch starts its workers anew, their
    sum counts instead, from the critical share on.

    On a GPU the wait for data is the host's time, and forward, backward, optimizer and communication are the device's:
    a host that runs ahead waits while the device works. Only what these leave of the step can be gained, and nothing if
    the GPUs are busy all the time.
    """

    warning_pct: float = 10.0
    critical_pct: float = 20.0
    steps: int = within(20, least=2, most=64)
    skip_steps: int = 5
    least_wait_s: float = 0.001
    busy_pct: float = 90.0
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "data_bound"
    severities = ("info", "warning", "critical")
    question = Question.IS_IT_FAST
    after = ("stage_imbalance",)
    reads = (
        Series("phase/data_s", merge="median", judged=True),
        *step_shares.READS,
        UTILIZATION,
        *loader_cores.READS,
        *cpu_load.READS,
    )
    charts = ("phase/data_s", "step_time_s")
    profile_helps = True
    level = "steps"
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        waits = window.by_step["phase/data_s"]
        took = window.series("step_time_s")
        if took is None or waits.total < self.steps + self.skip_steps:
            return None
        if sum(waits.last(_KEPT)) < self.least_wait_s * (self.steps - 1):
            return None  # nearly every step of a healthy run ends here
        usual = self._usual(window, waits, took)
        if usual is not None and usual.severity == "critical":
            return usual
        return self._now_and_then(window, waits, took) or usual

    def _usual(self, window: Window, waits: StepSeries, took: StepSeries) -> Finding | None:
        if sum(waits.last(self.steps)) < self.least_wait_s * (self.steps - 1):
            return None
        machine = loader_cores.loader_cores(window)
        workers = max(1, machine.of_rank) if machine is not None else 1
        rows = _by_step(waits, took, max(self.steps, _FEWEST_GROUPS * workers))
        if len(rows) < self.steps // 2:
            return None
        size = min(workers, len(rows) // _FEWEST_GROUPS)
        wait_s, step_s = _typical([row.wait_s for row in rows], size), _typical([row.time_s for row in rows], size)
        lowest = self.warning_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        enough = wait_s >= self.least_wait_s and 100 * wait_s >= lowest * step_s
        if not 0 < step_s < math.inf or not enough:
            return None
        # What a device computed meanwhile was not waited for: without the loader's wait the step still takes as long as
        # that.
        on_device = seconds_by_step(window, ON_DEVICE)
        gain_s = _typical([min(row.wait_s, row.time_s - on_device.get(row.step, 0.0)) for row in rows], size)
        share = min(100.0, 100 * gain_s / step_s)
        busy = busy_pct(window, took.time, sum(row.time_s for row in rows))
        if share < lowest or (busy is not None and busy >= self.busy_pct):
            return None
        return self._finding(window, rows, size, wait_s - gain_s, gain_s, step_s)

    def _now_and_then(self, window: Window, waits: StepSeries, took: StepSeries) -> Finding | None:
        """Few long waits that take a good part of the time: those at the beginning of each epoch."""
        rows, machine = _by_step(waits, took, _KEPT), loader_cores.loader_cores(window)
        if len(rows) < _KEPT // 2 or machine is None or not machine.of_rank:
            return None
        usual_s = median(row.time_s for row in rows)
        long = [row for row in rows if row.wait_s > _LONG_TIMES * usual_s]
        is_rare = _FEWEST_LONG <= len(long) <= _MOST_LONG_SHARE * len(rows)
        if (
            not is_rare or len(long) * machine.of_rank >= len(rows) / 2
        ):  # workers that deliver together make such waits, too
            return None
        wait_s, all_s = sum(row.wait_s for row in long), sum(row.time_s for row in rows)
        share, busy = 100 * wait_s / all_s, busy_pct(window, took.time, all_s)
        if share < self.critical_pct or (busy is not None and busy >= self.busy_pct):
            return None
        return self.found(
            "warning",
            cause="epochs begin",
            since_step=long[0].step,
            evidence={
                "share_pct": share, "long_wait_s": wait_s / len(long), "long_waits": len(long), "steps": len(rows),
                "step_time_s": usual_s, "workers": machine.of_rank,
            },
            gain_pct=share,
        )  # fmt: skip

    def _finding(
        self, window: Window, rows: list[_Row], size: int, hidden_s: float, wait_s: float, step_s: float
    ) -> Finding:
        share = min(100.0, 100 * wait_s / step_s)
        cause, machine = self._on_this_machine(window, share)
        ordered = sorted(row.wait_s for row in rows)
        took = window.by_step["step_time_s"].time
        # Without a GPU a training shares the cores with its loader, and both with whoever else is there.
        is_crowded = took is not None and UTILIZATION.name not in window.by_time and cpu_load.is_crowded(window, took)
        milder: Severity = "info" if is_crowded else "warning"
        return self.found(
            "critical" if share >= self.critical_pct else milder,
            cause=cause,
            since_step=window.at,
            evidence={
                "wait_s": wait_s, "step_time_s": step_s, "share_pct": share, "step_without_wait_s": step_s - wait_s,
                "hidden_wait_s": hidden_s, "wait_p50_s": ordered[len(ordered) // 2], "wait_p90_s": p90(ordered),
                "wait_max_s": ordered[-1], "steps": len(rows), "in_groups_of": size if size > 1 else None,
                "phases_s": means_over(window, {row.step for row in rows}), **machine,
            },
            gain_pct=share,
        )  # fmt: skip

    def _on_this_machine(self, window: Window, share: float) -> tuple[str, dict[str, float]]:
        """The cause: more workers than now have cores here, or not. With the figures that it rests on."""
        machine = loader_cores.loader_cores(window)
        if machine is None:
            return "", {}
        known = {"cores": machine.cores, "workers": machine.of_rank}
        wanted = machine.wanted(share / 100)
        return (
            ("too few workers", {**known, "advised_workers": wanted})
            if wanted > machine.of_rank
            else ("no core is free", known)
        )


class _Row(NamedTuple):
    """How long a step waited for its batch, and how long it took."""

    step: int
    wait_s: float
    time_s: float


def _typical(values: list[float], size: int) -> float:
    """The median of the means of groups of `size` steps, the newest one last; of all steps where that is 1."""
    if size == 1:
        return median(values)
    return median(sum(values[end - size : end]) / size for end in range(len(values), size - 1, -size))


def _by_step(waits: StepSeries, took: StepSeries, count: int) -> list[_Row]:
    """The newest steps of which both is known; not simply the newest step times: all of a frame's may be seen before
    its first wait is judged."""
    steps, values = waits.last_steps(count), waits.last(count)
    begin, end = bisect_left(took.steps, steps[0]), bisect_right(took.steps, steps[-1], hi=took.seen)
    times = dict(zip(took.steps[begin:end], took.values[begin:end], strict=True))
    return [_Row(step, wait, times[step]) for step, wait in zip(steps, values, strict=True) if step in times]
