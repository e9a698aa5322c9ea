"""data_bound: the step waits for its batch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from perfagent.wire import Finding, Severity
from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import Life, Question, Rule, Series, within
from perfagent_server.rules.speed import cpu_load, loader_cores, step_shares
from perfagent_server.rules.speed.step_shares import ON_DEVICE, UTILIZATION, busy_pct, means_over, seconds_by_step
from perfagent_server.rules.step_series import StepSeries
from perfagent_server.rules.window import Window

__all__ = ["DataBound"]

_FEWEST_GROUPS = 4
_EPOCH = "batch/epoch"
_STARTS = 5  # of epochs: whole ones lie between them
_HABIT = 3
_MUCH = 0.2  # of the cores that others take, and of a core that a worker uses


@dataclass(frozen=True, kw_only=True)
class DataBound(Rule):
    """The step waits for its batch: the share of phase/data_s in step_time_s, medians over ranks.

    A few long waits (the first batch of an epoch, a busy machine) make a mean that says nothing of a usual step, so
    medians count. The workers of a slow loader deliver together, and one step then waits for all of them: hence groups
    of as many steps as there are workers. Where each epoch starts its workers anew, the sum of the waits of its first
    steps counts instead, from the warning on. Without a GPU less than a third is a remark: healthy trainings that load
    their samples themselves wait for 13 to 26 % of a step of 10 to 20 ms.

    In the first epoch caches are cold, that of the system or one of the dataset's own: what waits in it counts from
    first_epoch_s on, and is no part of what later epochs are judged by. A loop without epochs has no such beginning.

    On a GPU the wait for data is the host's time, and forward, backward, optimizer and communication are the device's:
    a host that runs ahead waits while the device works. Only what these leave of the step can be gained, and nothing if
    the GPUs are busy all the time.
    """

    info_pct: float = 10.0
    warning_pct: float = 20.0
    warning_on_cpu_pct: float = 33.0
    critical_pct: float = 50.0
    steps: int = within(20, least=2, most=64)
    skip_steps: int = 5
    least_wait_s: float = 0.001
    first_epoch_s: float = 5.0
    busy_pct: float = 90.0
    clear_at: float = 0.8  # of the threshold

    id = "data_bound"
    severities = ("info", "warning", "critical")
    question = Question.IS_IT_FAST
    after = ("stage_imbalance",)
    reads = (
        Series("phase/data_s", merge="median", judged=True),
        Series(_EPOCH, merge="max"),
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
        # first_s: waited in the first epoch; starts: of later ones, [step, time, seconds beyond a usual wait]
        state = window.state_of(self, {"first_s": 0.0, "starts": []})
        since = self._follow_epochs(window, waits, state)
        if took is None or since is None or waits.total < self.steps + self.skip_steps:
            return None
        found = self._usual(window, waits, took, since), self._at_epoch_starts(window, waits, took, state["starts"])
        return max((one for one in found if one is not None), key=lambda one: one.gain_pct or 0.0, default=None)

    def _follow_epochs(self, window: Window, waits: StepSeries, state: dict[str, Any]) -> int | None:
        """The step from which on waits count; None in a first epoch in which little was waited so far."""
        epochs, at, wait = window.by_step.get(_EPOCH), window.at, waits.value or 0.0
        begun = bisect_right(epochs.steps, at) if epochs is not None else 0
        if epochs is None or not begun:
            return 0
        step, starts = epochs.steps[begun - 1], state["starts"]
        if epochs.values[begun - 1] <= 1:
            state["first_s"] += wait if math.isfinite(wait) else 0.0
            return 0 if state["first_s"] >= self.first_epoch_s else None
        if at <= step + 1:  # a loop that fetches ahead waits in the step after
            beyond = max(0.0, wait - median(waits.last(self.steps)))
            if starts and starts[-1][0] == step:
                starts[-1][2] = max(starts[-1][2], beyond)
            else:
                starts.append([step, waits.time, beyond])
                del starts[:-_STARTS]
        return next(begin for begin, epoch in zip(epochs.steps, epochs.values, strict=True) if epoch > 1)

    def _usual(self, window: Window, waits: StepSeries, took: StepSeries, since: int) -> Finding | None:
        if sum(waits.last(self.steps)) < self.least_wait_s * (self.steps - 1):
            return None  # nearly every step of a healthy run ends here
        machine = loader_cores.loader_cores(window)
        workers = max(1, machine.of_rank) if machine is not None else 1
        rows = _by_step(waits, took, max(self.steps, _FEWEST_GROUPS * workers), since)
        if len(rows) < self.steps // 2:
            return None
        size = min(workers, len(rows) // _FEWEST_GROUPS)
        wait_s, step_s = _typical([row.wait_s for row in rows], size), _typical([row.time_s for row in rows], size)
        lowest = self.info_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
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

    def _at_epoch_starts(
        self, window: Window, waits: StepSeries, took: StepSeries, starts: list[tuple[int, float, float]]
    ) -> Finding | None:
        """The first waits of epochs take a good part of the time: the workers start anew."""
        if len(starts) < _HABIT or not waits.time:
            return None
        machine, (first, since, _), (_, until, _) = loader_cores.loader_cores(window), starts[0], starts[-1]
        all_s, wait_s = until - since, sum(start[2] for start in starts[1:])
        is_over = waits.time - until > 2 * all_s / (len(starts) - 1)
        if machine is None or not machine.of_rank or all_s <= 0 or is_over:
            return None
        share, busy = min(100.0, 100 * wait_s / all_s), busy_pct(window, took.time, all_s)
        if share < self.warning_on_cpu_pct or (busy is not None and busy >= self.busy_pct):
            return None
        return self.found(
            "info" if _is_of_others(window, share, machine.of_rank) else "warning",
            cause="epochs begin",
            since_step=first,
            evidence={
                "share_pct": share, "long_wait_s": wait_s / (len(starts) - 1), "long_waits": len(starts) - 1,
                "steps": starts[-1][0] - first, "step_time_s": median(took.last(self.steps)), "workers": machine.of_rank,
            },
            gain_pct=share,
        )  # fmt: skip

    def _finding(
        self, window: Window, rows: list[_Row], size: int, hidden_s: float, wait_s: float, step_s: float
    ) -> Finding:
        share = min(100.0, 100 * wait_s / step_s)
        ordered, machine, cause, known = sorted(row.wait_s for row in rows), loader_cores.loader_cores(window), "", {}
        if machine is not None:  # whether more workers than now have cores here
            known, wanted = {"cores": machine.cores, "workers": machine.of_rank}, machine.wanted(share / 100)
            cause = "too few workers" if wanted > machine.of_rank else "no core is free"
            if machine.free and loader_cores.take_turns(window, machine, window.by_step["phase/data_s"].time or 0.0):
                cause, wanted = "too many workers", machine.free
            known |= {"advised_workers": wanted} if cause != "no core is free" else {}
        severity: Severity = "critical" if share >= self.critical_pct else "warning"
        if share < (self.warning_pct if UTILIZATION.name in window.by_time else self.warning_on_cpu_pct):
            severity = "info"
        return self.found(
            "info" if machine is not None and _is_of_others(window, share, machine.of_rank) else severity,
            cause=cause,
            since_step=window.at,
            evidence={
                "wait_s": wait_s, "step_time_s": step_s, "share_pct": share, "step_without_wait_s": step_s - wait_s,
                "hidden_wait_s": hidden_s, "wait_p50_s": ordered[len(ordered) // 2], "wait_p90_s": p90(ordered),
                "wait_max_s": ordered[-1], "steps": len(rows), "in_groups_of": size if size > 1 else None,
                "phases_s": means_over(window, {row.step for row in rows}), **known,
            },
            gain_pct=share,
        )  # fmt: skip


def _is_of_others(window: Window, share: float, workers: int) -> bool:
    """Whether workers that compute wait for cores, no more than others took of them. Without a GPU a training shares the
    cores with its workers, and both with whoever else is there. (Samples that it loads itself slow down as it does.)"""
    took = window.by_step["step_time_s"].time
    load = cpu_load.fullest(window, took) if took is not None and UTILIZATION.name not in window.by_time else None
    if load is None or not workers or load.workers < _MUCH * len(load.ranks) * workers:
        return False
    return load.others >= _MUCH * load.cores and share * load.cores <= 100 * load.others


class _Row(NamedTuple):
    """How long a step waited for its batch, and how long it took."""

    step: int
    wait_s: float
    time_s: float


def _typical(values: list[float], size: int) -> float:
    """The median of the means of groups of `size` steps, the newest one last."""
    return median(sum(values[end - size : end]) / size for end in range(len(values), size - 1, -size))


def _by_step(waits: StepSeries, took: StepSeries, count: int, since: int) -> list[_Row]:
    """The newest steps from `since` on of which both is known; not simply the newest step times: all of a frame's may be
    seen before its first wait is judged."""
    steps, values = waits.last_steps(count), waits.last(count)
    begin, end = bisect_left(took.steps, steps[0]), bisect_right(took.steps, steps[-1], hi=took.seen)
    times = dict(zip(took.steps[begin:end], took.values[begin:end], strict=True))
    known = (row for row in zip(steps, values, strict=True) if row[0] >= since and row[0] in times)
    return [_Row(step, wait, times[step]) for step, wait in known]
