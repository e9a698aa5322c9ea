"""Rules on where the step's time goes: the data loader, and a GPU that waits."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import ClassVar

from perfagent.wire import TIMED_PHASES, Finding
from perfagent_server.alerts.life import Life
from perfagent_server.diagnosis.remedies import REMEDIES
from perfagent_server.rules.window import UTILIZATION, Window

__all__ = ["DataBound", "LowGpuUtilization", "phase_means", "share_elsewhere", "spell_s"]

_LEAST_BUSY_S = 5.0  # utilization is sampled once a second


@dataclass(frozen=True, slots=True, kw_only=True)
class DataBound:
    """The step waits for its batch: the share of phase/data_s in step_time_s, medians over ranks, over the last `steps`
    steps.

    The single worst step of the window is left out: the first batch of an epoch waits for its workers to start. The
    first skip_steps steps are not judged, and a wait below least_wait_s a step is not worth anyone's time, whatever its
    share.

    On a GPU the loader's wait is the host's time, and forward, backward, optimizer and communication are the device's:
    a host that runs ahead may wait while the device works on what it was given. Only what these leave of the step can
    be gained, and where the GPUs are busy for busy_pct of the time nothing can.
    """

    warning_pct: float = 10.0
    critical_pct: float = 20.0
    steps: int = 20
    skip_steps: int = 5
    least_wait_s: float = 0.001
    busy_pct: float = 90.0
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
        steps = waits.last_steps(self.steps)
        # Not the newest step times: all of a frame's may be seen before its first wait is judged.
        begin, end = bisect_left(took.steps, steps[0]), bisect_right(took.steps, steps[-1], hi=took.seen)
        told, times = took.steps[begin:end], took.values[begin:end]
        if told != steps:  # measured by different rows: pair them by step
            by_step = dict(zip(told, times, strict=True))
            pairs = [(at, wait, by_step[at]) for at, wait in zip(steps, last, strict=True) if at in by_step]
            if len(pairs) < self.steps // 2:
                return None
            steps, last, times = (
                [at for at, _, _ in pairs],
                [wait for _, wait, _ in pairs],
                [time for _, _, time in pairs],
            )
        worst = max(range(len(last)), key=last.__getitem__)
        waited, total = sum(last) - last[worst], sum(times) - times[worst]
        count = len(last) - 1
        if not 0 < total < math.inf or not waited >= self.least_wait_s * count:
            return None
        # What a device computed meanwhile was not waited for: without the loader's wait the step still takes as long as
        # that.
        counted = {*steps} - {steps[worst]}
        gain = min(waited, total - sum(_seconds_in(window, phase, counted) for phase in _ON_DEVICE))
        share = min(100.0, 100 * gain / total)
        lowest = self.warning_pct * (self.clear_at if window.active(self.id) else 1.0)
        if share < lowest:
            return None
        busy = _busy_pct(window, took.time, total)
        if busy is not None and busy >= self.busy_pct:
            return None
        wait_s, step_s = gain / count, total / count
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
                "wait_s": wait_s, "step_time_s": step_s, "share_pct": share, "hidden_wait_s": (waited - gain) / count,
                "wait_p50_s": ordered[len(ordered) // 2], "wait_p90_s": ordered[int(0.9 * (len(ordered) - 1))],
                "wait_max_s": ordered[-1], "steps": len(last), "phases_s": phase_means(window, self.steps),
            },
            fix=REMEDIES[self.id],
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
                # a sampler may be slower than one a second
                covered += 1.0 if later is None else min(later - second, 5.0)
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
            evidence={
                "utilization_pct": mean,
                "over_s": covered,
                "samples": count,
                "phase_shares_pct": shares,
                "cause": cause,
            },
            fix=REMEDIES[self.id],
            gain_pct=None,
        )


_WAITS = {
    "data": "the step waits for its batch",
    "h2d": "copies to the device take the time",
    "comm": "communication takes the time",
    "checkpoint": "saving checkpoints takes the time",
    "eval": "evaluation takes the time",
    "rollout": "making rollouts (acting in an environment, generating) takes the time",
    "other": "Python code outside the model takes the time",
    "optimizer": "the optimizer's step takes the time",
    "forward": "the forward pass keeps the host busy: its kernels are small",
    "backward": "the backward pass keeps the host busy: its kernels are small",
}


_ON_DEVICE = ("forward", "backward", "optimizer", "comm")  # on CPU their times leave room for the loader's, too
_PAUSES = ("checkpoint", "eval")
_FEWEST_STEPS = 10
"""Of fewer steps no share is typical."""


def _cause(window: Window) -> tuple[dict[str, float], str]:
    """Shares of the newest steps by phase, and the one to look at, in words: what is not the model's own work comes
    first."""
    took = window.track("step_time_s")
    if took is None:
        return {}, ""
    steps, times = took.last_steps(took.size), took.last(took.size)
    # What was saved or evaluated after the last step stands under that step's number, beside its time.
    pauses = _seconds_by_step(window, _PAUSES)
    whole = sum(max(time, pauses.get(step, 0.0)) for step, time in zip(steps, times, strict=True))
    means = phase_means(window, took.size)
    if not whole > 0 or not means:
        return {}, ""
    shares = {phase: 100 * len(steps) * value / whole for phase, value in means.items()}
    waits = {phase: share for phase, share in shares.items() if phase not in ("forward", "backward")}
    phase = (
        max(waits, key=waits.__getitem__)
        if waits and max(waits.values()) >= 20
        else max(shares, key=shares.__getitem__)
    )
    return shares, f"{_WAITS[phase]} ({shares[phase]:.0f} % of the step)"


def share_elsewhere(window: Window) -> float | None:
    """What part of a typical step (the median of the newest) no phase accounts for, 0 to 1. None where too few steps
    tell, or the GPUs are busy all the same: the script then only waits for their work."""
    took, other = window.track("step_time_s"), window.tracks.get("phase/other_s")
    if took is None or other is None:
        return None
    times = dict(zip(took.last_steps(took.size), took.last(took.size), strict=True))
    told = {
        step: value
        for step, value in zip(other.steps, other.values, strict=True)
        if 0 < times.get(step, 0.0) < math.inf
    }
    busy = _busy_pct(window, took.time, sum(times.values()))
    if len(told) < _FEWEST_STEPS or (busy is not None and busy >= DataBound().busy_pct):
        return None
    if sorted(told.values())[len(told) // 2] < DataBound().least_wait_s:  # the loop of a toy
        return None
    return min(1.0, sorted(value / times[step] for step, value in told.items())[len(told) // 2])


def phase_means(window: Window, steps: int) -> dict[str, float]:
    """Mean seconds that each phase takes of the newest steps. A step without a phase (it saved no checkpoint) spent
    none in it; phases that none of them had are absent."""
    took = window.track("step_time_s")
    if took is None:
        return {}
    newest = set(took.last_steps(steps))
    sums = {phase: _seconds_in(window, phase, newest) for phase in TIMED_PHASES if _has(window, phase, newest)}
    return {phase: value / len(newest) for phase, value in sums.items()}


def _has(window: Window, phase: str, steps: set[int]) -> bool:
    track = window.tracks.get(f"phase/{phase}_s")
    return track is not None and not steps.isdisjoint(track.steps)


def _seconds_in(window: Window, phase: str, steps: set[int]) -> float:
    """Seconds that a phase took of these steps, as far as they are told. Not only of those that rules may see: the
    other phases of a step are shown to them after its wait for data."""
    track = window.tracks.get(f"phase/{phase}_s")
    if track is None or not steps:
        return 0.0
    # A frame may hold thousands of steps, all of them in the track before the first is judged.
    part = slice(bisect_left(track.steps, min(steps)), bisect_right(track.steps, max(steps)))
    return sum(value for step, value in zip(track.steps[part], track.values[part], strict=True) if step in steps)


def _seconds_by_step(window: Window, phases: tuple[str, ...]) -> dict[int, float]:
    spent: dict[int, float] = {}
    for phase in phases:
        track = window.tracks.get(f"phase/{phase}_s")
        for step, value in zip(track.steps, track.values, strict=True) if track else ():
            spent[step] = spent.get(step, 0.0) + value
    return spent


def _busy_pct(window: Window, until: float | None, seconds: float) -> float | None:
    """Mean utilization of the GPUs over the last seconds (at least _LEAST_BUSY_S) up to a time; None where it is not
    known."""
    if until is None:
        return None
    since = until - max(seconds, _LEAST_BUSY_S)
    found = [(value, samples) for second, value, samples, _ in window.busy if since <= second <= until]
    samples = sum(count for _, count in found)
    return sum(value for value, _ in found) / samples if samples else None


def spell_s(seconds: float) -> str:
    """A duration as people write it: 50 ms, 1.25 s, 180 µs."""
    if seconds >= 100:
        return f"{seconds:.0f} s"
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{1000 * seconds:.3g} ms" if seconds >= 0.001 else f"{1e6 * seconds:.3g} µs"
