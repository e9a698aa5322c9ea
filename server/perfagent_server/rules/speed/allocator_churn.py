"""allocator_churn: each step gives memory back to the system and takes it again, page by page."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from perfagent.wire import Finding
from perfagent_server.rules import steady_steps as steady
from perfagent_server.rules.data.batch_readings import reading_of, readings
from perfagent_server.rules.rule import Life, Question, Rule, within
from perfagent_server.rules.speed.step_shares import UTILIZATION, busy_pct
from perfagent_server.rules.window import Window

__all__ = ["AllocatorChurn"]

_FAULTS, _KERNEL = "process/page_faults_per_step", "process/system_cpu_pct"
_KEPT = 15
_PAGE = 4096


@dataclass(frozen=True, kw_only=True)
class AllocatorChurn(Rule):
    """Minor page faults of the training thread, by the time that it spends in the kernel.

    That time counts at most most_fault_us per fault, because a thread that reads files is in the kernel too. Measured:
    1,150 faults take 1.9 ms of a step of 6.1 ms, 2,260 faults 4.8 of 40 ms on a busy machine, 0.7 to 2.1 us each. If a
    GPU is busy, the host's work is hidden. Where much time passes between steps, the faults may be those of saves and
    evaluations, which rightly give back what they took: a remark.
    """

    share_pct: float = 10.0
    warning_pct: float = 25.0
    fault_us: float = 0.7
    most_fault_us: float = 2.0
    least_faults: float = 50.0
    most_pauses: float = 1.5  # of the time that the steps take
    steps: int = within(50, least=2, most=50)
    readings: int = within(3, least=1, most=_KEPT)
    busy_pct: float = 80.0
    clear_at: float = 0.8  # of the threshold

    id = "allocator_churn"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("recompiles",)
    reads = (reading_of(_FAULTS, keep=_KEPT), reading_of(_KERNEL, keep=_KEPT), steady.reads(50), UTILIZATION)
    charts = (_FAULTS, _KERNEL)
    profile_helps = True
    life = Life(restated=True)

    def judge(self, window: Window) -> Finding | None:
        faults = readings(window, _FAULTS, self.readings)
        if len(faults) < self.readings or min(faults) < self.least_faults:
            return None  # nearly every run
        _, times = steady.steady_steps(window, self.steps)
        if len(times) < self.steps:
            return None
        step_s = median(times)
        kernel = readings(window, _KERNEL, self.readings)
        in_kernel = sum(kernel) / len(kernel) if kernel else None
        lowest = self.share_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        if self._share(min(faults), step_s, in_kernel) < lowest:
            return None
        took = window.series("step_time_s")
        busy = busy_pct(window, took.time if took is not None else None, sum(times))
        if busy is not None and busy >= self.busy_pct:
            return None
        mean = sum(faults) / len(faults)
        share, spent = self._share(mean, step_s, in_kernel), window.wall.recent()
        is_of_steps = spent.wall_s <= self.most_pauses * spent.steps * step_s
        return self.found(
            "warning" if share >= self.warning_pct and is_of_steps else "info",
            since_step=window.step,
            evidence={
                "faults_per_step": mean, "step_time_s": step_s, "share_pct": share, "lost_s": share / 100 * step_s,
                "system_cpu_pct": in_kernel, "bytes_per_step": mean * _PAGE,
            },
            gain_pct=share,
        )  # fmt: skip

    def _share(self, faults: float, step_s: float, in_kernel: float | None) -> float:
        """What so many faults take of the step, in percent."""
        most = 1e-4 * faults / step_s
        return min(self.fault_us * most, 100.0) if in_kernel is None else min(self.most_fault_us * most, in_kernel)
