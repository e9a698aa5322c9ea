"""What a run is bound by: where the time of its steady steps goes, and what is worth trying next. For the verdict of a run
in which nothing is wrong, and for the rules that say it as a finding. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from perfagent_server.rules.evidence import p90
from perfagent_server.rules.rule import Series
from perfagent_server.rules.speed import step_shares
from perfagent_server.rules.speed.step_shares import ON_DEVICE, PAUSES, UTILIZATION, seconds_in
from perfagent_server.rules.steady_steps import steady_steps
from perfagent_server.rules.texts import Language, Said, said, text_of
from perfagent_server.rules.window import Window

__all__ = ["READS", "Bound", "Kind", "Roofline", "bound_figures", "roofline", "what_bounds"]

Kind = Literal[
    "compute", "memory bandwidth", "launches", "data", "copies", "communication", "rollout", "own code", "unmeasured"
]

_ACTIVITY = tuple(
    Series(name, keep=60, axis="time") for name in ("gpu/sm_active_pct", "gpu/tensor_active_pct", "gpu/dram_active_pct")
)
READS = (*step_shares.READS, UTILIZATION, Series("mfu"), *_ACTIVITY)
"""What a rule must read for the window to hold what is asked here."""

_MOST_STEPS = 48  # of the 64 that are kept of a phase: some are no steady ones
_FEWEST_STEPS = 10
_LEAST_S = 5.0  # utilization is sampled once a second
_BUSY_PCT = 90.0
_IDLE_PCT = 70.0
_FEW_SM_PCT = 40.0
"""The multiprocessors have work for so little of the time that the kernels cannot follow each other closely."""
_BANDWIDTH_PCT = 60.0
"""DRAM activity counts cycles in which a transfer took place; copies of large blocks reach 80 to 95 %."""
_GOOD_MFU = 0.40
_PARTS: dict[Kind, tuple[str, ...]] = {
    "compute": ("forward", "backward", "optimizer"),
    "data": ("data",),
    "copies": ("h2d",),
    "communication": ("comm",),
    "rollout": ("rollout",),
    "unmeasured": ("other",),
}


_ADVISED_BY: dict[Kind, tuple[str, str]] = {
    "compute": ("compute_bound", ""),
    "memory bandwidth": ("compute_bound", "memory bandwidth"),
    "launches": ("host_bound", ""),
    "data": ("data_bound", ""),
    "copies": ("h2d_bound", ""),
    "communication": ("comm_bound", ""),
    "rollout": ("unmeasured_time", "rollouts"),
    "own code": ("unmeasured_time", "own phase"),
    "unmeasured": ("unmeasured_time", ""),
}
"""The rule, and the cause of it, whose remedy is worth trying."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """How much of what the device can do is used; None: not known. mfu: a share of its dense peak, 0 to 1."""

    mfu: float | None = None
    busy_pct: float | None = None
    sm_pct: float | None = None
    tensor_pct: float | None = None
    memory_pct: float | None = None

    @property
    def mfu_pct(self) -> float | None:
        return None if self.mfu is None else 100 * self.mfu

    @property
    def is_on_gpu(self) -> bool:
        return any(one is not None for one in (self.busy_pct, self.sm_pct, self.tensor_pct, self.memory_pct))


@dataclass(frozen=True, slots=True)
class Bound:
    """kind: what takes most of a step; share_pct: how much of it; shares_pct: of all kinds that took any, which add up
    to 100. The "compute" among them is forward, backward and optimizer also where it is the device's memory or the host
    that holds these back. steps: how many were looked at; phase: the name of the script's own phase, where that is it."""

    kind: Kind
    share_pct: float
    shares_pct: dict[str, float]
    step_p50_s: float
    step_p90_s: float
    steps: int
    roofline: Roofline
    phase: str = ""

    @property
    def cause(self) -> str:
        """Of compute_bound, where it is compute."""
        device = self.roofline
        if self.kind == "compute" and not device.is_on_gpu:
            return "without a GPU"
        return "well used" if self.kind == "compute" and (device.mfu or 0.0) >= _GOOD_MFU else _ADVISED_BY[self.kind][1]

    def figures(self) -> dict[str, object]:
        """For the evidence, and for the sentence of compute_bound."""
        device = self.roofline
        return {
            **bound_figures(self), "share_pct": self.share_pct, "step_p50_s": self.step_p50_s, "step_p90_s": self.step_p90_s,
            "steps": self.steps, "own_phase": self.phase, "mfu_pct": device.mfu_pct,
            "sm_active_pct": device.sm_pct, "tensor_active_pct": device.tensor_pct, "dram_active_pct": device.memory_pct,
        }  # fmt: skip

    def said(self, language: Language = "en") -> Said:
        """What it is, as a sentence of compute_bound, and what to try: the remedy of the rule on that."""
        words = said(text_of("compute_bound", language), "", self.figures(), language)
        return replace(words, fix=text_of(_ADVISED_BY[self.kind][0], language).remedies[self.cause])


def bound_figures(bound: Bound | None) -> dict[str, object]:
    """What other rules put into their evidence."""
    if bound is None:
        return {}
    return {"bound_by": bound.kind, "bound_share_pct": bound.share_pct, "shares_pct": bound.shares_pct}


def what_bounds(window: Window) -> Bound | None:
    """What bounds the newest steady steps; None where too few steps, or no phases, are known."""
    steps, took = _typical_steps(window), window.track("step_time_s")
    if len(steps) < _FEWEST_STEPS:
        return None
    times = {step: value for step, value in zip(took.steps, took.values, strict=True) if step in steps}
    total = sum(times.values())
    device = roofline(window)
    shares = _shares(window, steps, total, device)
    if not shares:
        return None
    largest = max(shares, key=lambda kind: shares[kind])
    kind = _of_device(device) if largest == "compute" else largest
    ordered = sorted(times.values())
    return Bound(
        kind=kind,
        share_pct=100 * shares[largest],
        shares_pct={name: 100 * share for name, share in shares.items()},
        step_p50_s=median(ordered),
        step_p90_s=p90(ordered),
        steps=len(ordered),
        roofline=device,
        phase=_own_phase(window) if kind == "own code" else "",
    )


def roofline(window: Window) -> Roofline:
    """Means over the newest minute at most, up to the newest step: while a run stands still its device does nothing."""
    took = window.track("step_time_s")
    if took.time is None:
        return Roofline()
    until, since = took.time, took.time - max(_LEAST_S, min(60.0, sum(took.last(64))))

    def mean(name: str) -> float | None:
        return window.readings(name).mean(since, until)

    known = [value for value in window.track("mfu").last(32) if math.isfinite(value)]
    return Roofline(
        mfu=median(known) if known else None,
        busy_pct=mean(UTILIZATION.name),
        sm_pct=mean("gpu/sm_active_pct"),
        tensor_pct=mean("gpu/tensor_active_pct"),
        memory_pct=mean("gpu/dram_active_pct"),
    )


def _typical_steps(window: Window) -> set[int]:
    """The newest steady steps whose phases are all known. Where each step has a phase beside training (a rollout, one
    that the script named), those without an evaluation or a save."""
    told = set(window.track("phase/other_s").steps)
    if not told:
        return told
    steady = [step for step in steady_steps(window, _MOST_STEPS)[0] if step in told]
    if len(steady) >= _FEWEST_STEPS:
        return set(steady)
    told -= step_shares.seconds_by_step(window, PAUSES).keys()
    return {step for step, value in window.track("step_time_s").rows() if step in told and 0 < value < math.inf}


def _shares(window: Window, steps: set[int], total: float, device: Roofline) -> dict[Kind, float]:
    """Kind -> share of the steps' time, 0 to 1. What is left over is a phase that the script named."""
    if not total > 0:
        return {}
    spent: dict[Kind, float] = {kind: seconds_in(window, steps, *phases) for kind, phases in _PARTS.items()}
    if device.busy_pct is not None and device.busy_pct >= _BUSY_PCT:
        # The host waited for work that the device had been given before: that is no time of its own.
        spent["compute"], spent["unmeasured"] = spent["compute"] + spent["unmeasured"], 0.0
    # A host that runs ahead waits for its batch while the device computes: only what the device leaves is lost.
    spent["data"] = min(spent["data"], max(0.0, total - seconds_in(window, steps, *ON_DEVICE)))
    spent["own code"] = max(0.0, total - sum(spent.values()))
    whole = sum(spent.values())
    return {kind: seconds / whole for kind, seconds in spent.items() if seconds > 0.0005 * whole}


def _of_device(device: Roofline) -> Kind:
    """What holds forward, backward and optimizer back."""
    if device.memory_pct is not None and device.memory_pct >= max(_BANDWIDTH_PCT, device.tensor_pct or 0.0):
        return "memory bandwidth"
    if device.sm_pct is not None:
        return "launches" if device.sm_pct < _FEW_SM_PCT else "compute"
    return "launches" if device.busy_pct is not None and device.busy_pct < _IDLE_PCT else "compute"


def _own_phase(window: Window) -> str:
    """The script's own phase that takes most of the newest minutes."""
    seconds = window.wall.recent().seconds
    named = {phase: spent for phase, spent in seconds.items() if f"phase/{phase}_s" not in window.by_step}
    return max(named, key=lambda phase: named[phase], default="")
