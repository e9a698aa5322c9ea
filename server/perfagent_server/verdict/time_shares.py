"""What a run spends its wall time on, from the end of its first step on: it adds up to all of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.life.hang import Hang
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.step_shares import UTILIZATION, share_elsewhere
from perfagent_server.rules.window import Window

__all__ = ["SHARE_RULES", "TimeShares", "held_back_by", "is_good_share", "standing_s", "time_shares"]

_COMPUTE = ("forward", "backward", "optimizer")
_WORDS = {
    "data": "waiting for data", "eval": "evaluation", "checkpoint": "saves", "comm": "communication",
    "h2d": "copies to the device", "rollout": "rollouts", "compile": "compiling",
}  # fmt: skip
_ELSEWHERE = "code that no phase measures"
_RULE_OF = {
    "data": "data_bound", "h2d": "h2d_bound", "comm": "comm_bound", "eval": "eval_bound", "checkpoint": "checkpoint_bound",
    "compile": "recompiles",
}  # fmt: skip
"""Rules about a phase; all others are time that no rule names."""
SHARE_RULES = frozenset((*_RULE_OF.values(), "unmeasured_time"))
_WITHIN = ("data", "comm", "h2d", "rollout", "other")
"""Phases that every step may have, without being compute."""
_OF_THE_RUN = "of the whole run"
"""The cause of what these rules say of the whole run."""
_THIRD, _MOST = 1 / 3, 0.5
"""Of the wall time, between steps, or of the step for a phase that is not compute; for all of these together: from then on no
verdict is healthy."""
_FEWEST_STEPS, _ENOUGH_S = 20, 60.0
_LEAST_S = 0.001  # a step: below it, the loop of a toy
_STANDS_S = 60.0
_STANDS_STEPS = 5.0
"""From so long on, and so many times the longest of the newest steps, the run stands still."""


@dataclass(frozen=True, slots=True)
class TimeShares:
    """seconds: by what they were spent on, in words; they add up to wall_s. phases: the same by phase, and only those
    that a step has; often: in how many steps a phase was."""

    wall_s: float
    seconds: dict[str, float]
    phases: dict[str, float]
    often: dict[str, int]
    steps: int
    rank: int | None = None
    """Whose time this is, where several ranks have their own."""

    def share(self, name: str) -> float:
        return self.seconds.get(name, 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    def percents(self) -> dict[str, float]:
        """Of the wall time, largest first; what took less than 0.1 % is left out."""
        shares = {name: 100 * seconds / self.wall_s for name, seconds in self.seconds.items() if self.wall_s > 0}
        return {name: round(share, 1) for name, share in sorted(shares.items(), key=_largest) if share >= 0.1}

    def evidence(self) -> dict[str, object]:
        rank = {} if self.rank is None else {"wall_time_rank": self.rank}
        return {"wall_time_pct": self.percents(), **rank, **self.scaling()}

    def scaling(self) -> dict[str, float]:
        """Of a run with communication: what it takes as a multiple of compute, and the scaling efficiency that follows
        (what a step would take without it, as a share of what it takes). A rank alone is taken to compute as fast; what
        a smaller run really reached says more."""
        comm, compute = self.phases.get("comm", 0.0), sum(self.phases.get(phase, 0.0) for phase in _COMPUTE)
        in_steps_s = self.wall_s - self.seconds.get("stopped", 0.0)
        if not (comm > 0 and compute > 0 and in_steps_s > comm):
            return {}
        return {
            "comm_to_compute": round(comm / compute, 3),
            "scaling_efficiency_pct": round(100 * (1 - comm / in_steps_s), 1),
        }


def _largest(item: tuple[str, float]) -> float:
    return -item[1]


def time_shares(window: Window) -> TimeShares | None:
    """Where the time of all steps went. None while there is no step time, or no phase."""
    whole = window.wall.whole()
    if not whole.steps or not whole.seconds:
        return None
    told = {phase: seconds for phase, seconds in whole.seconds.items() if phase != "other"}
    seconds = {"training": sum(told.pop(phase, 0.0) for phase in _COMPUTE)}
    for phase, spent_s in told.items():
        seconds[_WORDS.get(phase, phase)] = spent_s
    # What overlaps is counted in two phases: then nothing is left.
    seconds[_ELSEWHERE] = max(0.0, whole.wall_s - sum(seconds.values()))
    seconds["stopped"] = whole.stopped_s + standing_s(window)
    return TimeShares(
        wall_s=sum(seconds.values()),
        seconds={name: value for name, value in seconds.items() if value > 0},
        phases={**whole.seconds},
        often={**whole.often},
        steps=whole.steps,
        rank=window.wall.rank if window.world_size > 1 else None,
    )


def standing_s(window: Window) -> float:
    """For how long no rank has reported a step, by our own clock, where that is unlike this run; else 0. It may
    evaluate, save or hang."""
    took = window.series("step_time_s")
    if took is None or window.ended or not took.ranks:
        return 0.0
    quiet = window.now - max(took.ranks.values())
    return quiet if quiet >= max(_STANDS_S, _STANDS_STEPS * max(took.last(took.size))) else 0.0


def is_good_share(finding: Finding) -> bool:
    """Whether a finding, be it a remark, says that so much of the time is no training that the run is not healthy."""
    return finding.rule in SHARE_RULES and finding.evidence.get("share_pct", 0.0) >= 100 * _THIRD


def held_back_by(window: Window, shares: TimeShares | None) -> Finding | None:
    """What a verdict must say instead of `healthy`, where no rule found it: anything beside training took a third of the
    wall time, a phase other than compute as much of the step, or all of these together took half of it."""
    if standing := standing_s(window):
        return Hang().so_far(window, standing)
    if shares is None or (shares.steps < _FEWEST_STEPS and shares.wall_s < _ENOUGH_S):
        return None
    worth = {phase: seconds for phase, seconds in shares.phases.items() if seconds >= _LEAST_S * shares.steps}
    # what is compiled in the first minutes of a run says nothing of it; what goes on has a rule of its own
    beside = {phase: seconds for phase, seconds in worth.items() if phase not in (*_COMPUTE, *_WITHIN, "compile")}
    return _beside_training(window, shares, beside) or _within_steps(window, shares, beside, worth)


def _beside_training(window: Window, shares: TimeShares, beside: dict[str, float]) -> Finding | None:
    """Evaluations, saves, phases of the script and stops, where they took a third of the wall time together."""
    stopped_s = shares.seconds.get("stopped", 0.0)
    if sum(beside.values()) + stopped_s < _THIRD * shares.wall_s:
        return None
    largest = max(beside, key=lambda phase: beside[phase], default="")
    if stopped_s >= beside.get(largest, 0.0):
        return _stopped(shares)
    return _on_phase(shares, largest, beside, window.wall.whole().wall_s)


def _within_steps(
    window: Window, shares: TimeShares, beside: dict[str, float], worth: dict[str, float]
) -> Finding | None:
    """Names a phase other than compute that took a third of the steps' time. If all such phases together took half of it, names
    the largest. Communication without a GPU must take half: ranks that share cores wait nearly that long (`comm_bound`)."""
    in_steps_s = window.wall.whole().wall_s
    # where the host only waits for a busy device, the rest of the step is no time of its own
    elsewhere = share_elsewhere(window) or 0.0
    within = {phase: worth[phase] for phase in _WITHIN if phase in worth and (phase != "other" or elsewhere)}
    if not within or in_steps_s <= 0:
        return None
    largest = max(within, key=lambda phase: within[phase])
    on_cores = largest == "comm" and UTILIZATION.name not in window.by_time
    least = _MOST if on_cores else _THIRD
    is_third = within[largest] >= least * in_steps_s and (largest != "other" or elsewhere >= _THIRD)
    is_half = sum(beside.values()) + sum(within.values()) >= _MOST * in_steps_s
    return _on_phase(shares, largest, {}, in_steps_s) if is_third or is_half else None


def _rule(name: str) -> Rule:
    return next(rule for rule in all_rules() if rule.id == name)


def _on_phase(shares: TimeShares, phase: str, beside: dict[str, float], in_steps_s: float) -> Finding:
    """beside: seconds of the phases that together are more than a verdict passes over."""
    spent_s = shares.phases[phase]
    share, is_once = 100 * spent_s / in_steps_s, shares.often.get(phase) == 1
    is_one_of_many = bool(beside) and not is_once and share < 100 * _THIRD
    return _rule(_RULE_OF.get(phase, "unmeasured_time")).found(
        "info",
        cause=_OF_THE_RUN if phase in _RULE_OF or phase == "other" else "rollouts" if phase == "rollout" else "own phase",
        evidence={
            "phase": phase, "share_pct": share, "seconds": spent_s, "steps": shares.steps,
            "once_s": spent_s if is_once else None, "each_step_s": None if is_once else spent_s / shares.steps,
            "step_time_s": in_steps_s / shares.steps,
            "pauses_pct": 100 * sum(beside.values()) / in_steps_s if is_one_of_many else None, **shares.evidence(),
        },
        gain_pct=None if is_once else share,  # no habit to change
    )  # fmt: skip


def _stopped(shares: TimeShares) -> Finding:
    return _rule("process_crash").found(
        "info",
        cause="between attempts",
        evidence={
            "stopped_s": shares.seconds["stopped"], "stopped_pct": 100 * shares.share("stopped"), "wall_s": shares.wall_s,
            **shares.evidence(),
        },
    )  # fmt: skip
