"""low_gpu_utilization: the GPUs are idle much of the time."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import step_shares
from perfagent_server.rules.speed.step_shares import PAUSES, means_over, seconds_by_step
from perfagent_server.rules.speed.while_stepping import while_stepping
from perfagent_server.rules.window import Window

__all__ = ["LowGpuUtilization"]


@dataclass(frozen=True, kw_only=True)
class LowGpuUtilization(Rule):
    """The GPUs are idle much of the time: mean over ranks and over for_s seconds of stepping (pauses do not count).

    Absent utilization (no NVIDIA GPU, no NVML) is not zero: the rule then says nothing.
    """

    warning_below_pct: float = 30.0
    info_below_pct: float = 70.0
    for_s: float = within(300.0, least=1, most=600)
    clear_at: float = 1.1  # times the threshold

    id = "low_gpu_utilization"
    severities = ("info", "warning")
    question = Question.IS_IT_FAST
    after = ("throttling",)
    reads = (Series("gpu/utilization_pct", keep=600, axis="time", judged=True), *step_shares.READS)
    charts = ("gpu/utilization_pct",)
    profile_helps = True
    level = "for_s"
    life = Life(clear_s=60.0, restated=True)

    def judge(self, window: Window) -> Finding | Unknown | None:
        typical = while_stepping(window, "gpu/utilization_pct", self.for_s)
        if typical is None:
            return UNKNOWN
        mean, covered, count = typical
        limit = self.info_below_pct * (self.clear_at if window.is_firing(self.id) else 1.0)
        if mean >= limit:
            return None
        shares = _shares(window)
        phase = _phase_to_look_at(shares)
        return self.found(
            "warning" if mean < self.warning_below_pct else "info",
            since_step=window.step,
            evidence={
                "utilization_pct": mean, "idle_pct": 100 - mean, "over_s": covered, "samples": count, "phase": phase,
                "phase_share_pct": shares.get(phase), "phase_shares_pct": shares,
            },
        )  # fmt: skip


def _shares(window: Window) -> dict[str, float]:
    """Of the newest steps by phase, in percent."""
    times = dict(window.track("step_time_s").rows())
    # What was saved or evaluated after the last step stands under that step's number, beside its time.
    pauses = seconds_by_step(window, PAUSES)
    whole = sum(max(time, pauses.get(step, 0.0)) for step, time in times.items())
    means = means_over(window, {*times}) if whole > 0 else {}
    return {phase: 100 * len(times) * value / whole for phase, value in means.items()}


def _phase_to_look_at(shares: dict[str, float]) -> str:
    """What is not the model's own work comes first."""
    waits = {phase: share for phase, share in shares.items() if phase not in ("forward", "backward")}
    asked = waits if waits and max(waits.values()) >= 20 else shares
    return max(asked, key=lambda phase: asked[phase], default="")
