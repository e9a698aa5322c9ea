"""Rules on where the step's time goes: the data loader, and a GPU that waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import PHASES, Finding
from perfagent_server.alerts.life import Life
from perfagent_server.diagnosis.remedies import REMEDIES, data_remedy
from perfagent_server.rules.window import UTILIZATION, Window

__all__ = ["DataBound", "LowGpuUtilization"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBound:
    """The step waits for its batch: the share of phase/data_s in step_time_s, medians over ranks, over the last `steps` steps.

    The single worst step of the window is left out: the first batch of an epoch waits for its workers to start. The first
    skip_steps steps are not judged, and a wait below least_wait_s a step is not worth anyone's time, whatever its share.
    """

    warning_pct: float = 10.0
    critical_pct: float = 20.0
    steps: int = 20
    skip_steps: int = 5
    least_wait_s: float = 0.001
    clear_at: float = 0.8  # of the threshold

    id: ClassVar[str] = "data_bound"
    on: ClassVar[tuple[str, ...]] = ("phase/data_s",)
    urgent: ClassVar[str] = ""
    life: ClassVar[Life] = Life(clear_steps=20)

    def judge(self, window: Window) -> Finding | None:
        waits = window.tracks["phase/data_s"]
        took = window.track("step_time_s")
        if took is None or waits.total < self.steps + self.skip_steps:
            return None
        last = waits.last(self.steps)
        if sum(last) < self.least_wait_s * (self.steps - 1):
            return None  # nearly every step of a healthy run ends here
        if waits.last_steps(self.steps) == took.last_steps(self.steps):
            times = took.last(self.steps)
        else:  # measured by different rows: pair them by step
            by_step = dict(zip(took.last_steps(took.size), took.last(took.size), strict=True))
            pairs = [(wait, by_step[at]) for at, wait in zip(waits.last_steps(self.steps), last, strict=True) if at in by_step]
            if len(pairs) < self.steps // 2:
                return None
            last, times = [wait for wait, _ in pairs], [time for _, time in pairs]
        worst = max(range(len(last)), key=last.__getitem__)
        waited, total = sum(last) - last[worst], sum(times) - times[worst]
        count = len(last) - 1
        if not total > 0 or not waited >= self.least_wait_s * count:
            return None
        share = min(100.0, 100 * waited / total)
        lowest = self.warning_pct * (self.clear_at if window.active(self.id) else 1.0)
        if share < lowest:
            return None
        wait_s, step_s = waited / count, total / count
        ordered = sorted(last)
        return Finding(
            rule=self.id,
            severity="critical" if share >= self.critical_pct else "warning",
            message=(
                f"The data loader keeps each step waiting {spell_s(wait_s)} of {spell_s(step_s)} ({share:.0f} %): "
                f"without that wait a step would take {spell_s(step_s - wait_s)}."
            ),
            since_step=window.at,
            evidence={
                "wait_s": wait_s, "step_time_s": step_s, "share_pct": share, "wait_p50_s": ordered[len(ordered) // 2],
                "wait_p90_s": ordered[int(0.9 * (len(ordered) - 1))], "wait_max_s": ordered[-1], "steps": len(last),
                "phases_s": phase_means(window, self.steps),
            },
            fix=data_remedy(None),
            gain_pct=share,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LowGpuUtilization:
    """The GPUs are idle much of the time: mean over ranks and over for_s seconds of stepping (pauses do not count).

    Absent utilization (no NVIDIA GPU, no NVML) is not zero: the rule then says nothing.
    """

    warning_below_pct: float = 30.0
    info_below_pct: float = 70.0
    for_s: float = 300.0
    clear_at: float = 1.1  # times the threshold

    id: ClassVar[str] = "low_gpu_utilization"
    on: ClassVar[tuple[str, ...]] = (UTILIZATION,)
    urgent: ClassVar[str] = ""
    life: ClassVar[Life] = Life(clear_s=60.0)

    def judge(self, window: Window) -> Finding | None:
        covered = total = count = 0.0
        later: float | None = None
        for second, value, samples, stepping in reversed(window.busy):
            if stepping:
                covered += 1.0 if later is None else min(later - second, 5.0)  # a sampler may be slower than one a second
                total += value
                count += samples
            later = second
            if covered >= self.for_s:
                break
        if covered < self.for_s or not count:
            return None
        mean = total / count
        limit = self.info_below_pct * (self.clear_at if window.active(self.id) else 1.0)
        if mean >= limit:
            return None
        shares, cause = _cause(window)
        said = f"; {cause}" if cause else ""
        return Finding(
            rule=self.id,
            severity="warning" if mean < self.warning_below_pct else "info",
            message=f"The GPU is busy {mean:.0f} % of the time over {covered:.0f} s of stepping{said}.",
            since_step=window.step,
            evidence={"utilization_pct": mean, "over_s": covered, "samples": count, "phase_shares_pct": shares, "cause": cause},
            fix=REMEDIES[self.id],
            gain_pct=None,
        )


_WAITS = {
    "data": "the step waits for its batch",
    "h2d": "copies to the device take the time",
    "comm": "communication takes the time",
    "checkpoint": "saving checkpoints takes the time",
    "eval": "evaluation takes the time",
    "other": "Python code outside the model takes the time",
    "optimizer": "the optimizer's step takes the time",
    "forward": "the forward pass keeps the host busy: its kernels are small",
    "backward": "the backward pass keeps the host busy: its kernels are small",
}


def _cause(window: Window) -> tuple[dict[str, float], str]:
    """Shares of the step by phase, and the one to look at, in words: what is not the model's own work comes first."""
    means = phase_means(window, 32)
    step_s = _mean_of(window, "step_time_s", 32)
    if not step_s or not means:
        return {}, ""
    shares = {phase: 100 * value / step_s for phase, value in means.items()}
    waits = {phase: share for phase, share in shares.items() if phase not in ("forward", "backward")}
    phase = max(waits, key=waits.__getitem__) if waits and max(waits.values()) >= 20 else max(shares, key=shares.__getitem__)
    return shares, f"{_WAITS[phase]} ({shares[phase]:.0f} % of the step)"


def phase_means(window: Window, steps: int) -> dict[str, float]:
    """Mean seconds of each phase over the last steps; phases that were not measured are absent."""
    means = {phase: _mean_of(window, f"phase/{phase}_s", steps) for phase in PHASES}
    return {phase: value for phase, value in means.items() if value is not None}


def _mean_of(window: Window, name: str, steps: int) -> float | None:
    track = window.tracks.get(name)
    values = track.values[-steps:] if track else []
    return sum(values) / len(values) if values else None


def spell_s(seconds: float) -> str:
    """A duration as people write it: 50 ms, 1.25 s, 180 µs."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else f"{1e6 * seconds:.3g} µs"
