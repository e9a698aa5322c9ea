"""What a run spends its wall time on, from the end of its first step on: it adds up to all of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from perfagent.wire import Finding
from perfagent_server.rules.catalogue import all_rules
from perfagent_server.rules.evidence import spell_s
from perfagent_server.rules.rule import Rule
from perfagent_server.rules.speed.step_shares import share_elsewhere
from perfagent_server.rules.window import Window

__all__ = ["SHARE_RULES", "TimeShares", "held_back_by", "standing_s", "time_shares"]

_COMPUTE = ("forward", "backward", "optimizer", "rollout")
_TRAINING = (*_COMPUTE, "h2d")
_BESIDE = {"data": "waiting for data", "eval": "evaluation", "checkpoint": "saves", "comm": "communication"}
_ELSEWHERE = "code that no phase measures"
_RULE_OF = {
    "data": "data_bound", "h2d": "h2d_bound", "comm": "comm_bound", "eval": "eval_bound", "checkpoint": "checkpoint_bound",
}  # fmt: skip
"""Rules about a phase; all others are time that no rule names."""
SHARE_RULES = frozenset((*_RULE_OF.values(), "unmeasured_time"))
"""Rules that say what part of the time is not training: they hold a run back also where their finding is only info."""
_WITHIN = ("comm", "h2d", "other")
"""Phases that every step may have, without being compute."""
_NEVER_HEALTHY, _THIRD = 0.10, 1 / 3
"""Of the wall time beside training, and of the step for a phase that is not compute: from then on no verdict is
healthy."""
_FEWEST_STEPS = 20
_LEAST_S = 0.001  # a step: below it, the loop of a toy
_STANDS_S = 60.0
_STANDS_STEPS = 5.0
"""From so long on, and so many times the longest of the newest steps, the run stands still."""


@dataclass(frozen=True, slots=True)
class TimeShares:
    """seconds: by what they were spent on, in words; they add up to wall_s. phases: the same by phase, and only those
    that a step has."""

    wall_s: float
    seconds: dict[str, float]
    phases: dict[str, float]
    steps: int

    def share(self, name: str) -> float:
        return self.seconds.get(name, 0.0) / self.wall_s if self.wall_s > 0 else 0.0

    def percents(self) -> dict[str, float]:
        """Of the wall time, largest first; what took less than 0.1 % is left out."""
        shares = {name: 100 * seconds / self.wall_s for name, seconds in self.seconds.items() if self.wall_s > 0}
        return {name: round(share, 1) for name, share in sorted(shares.items(), key=_largest) if share >= 0.1}

    def spelled(self) -> str:
        """`91 % training, 6 % evaluation, 3 % saves`."""
        return ", ".join(f"{share:.0f} % {name}" for name, share in self.percents().items() if share >= 0.5)


def _largest(item: tuple[str, float]) -> float:
    return -item[1]


def time_shares(window: Window) -> TimeShares | None:
    """Where the time of all steps went. None while there is no step time, or no phase."""
    whole = window.wall.whole()
    if not whole.steps or not whole.seconds:
        return None
    told = {phase: seconds for phase, seconds in whole.seconds.items() if phase != "other"}
    seconds = {"training": sum(told.pop(phase, 0.0) for phase in _TRAINING)}
    for phase, spent_s in told.items():
        seconds[_BESIDE.get(phase, phase)] = spent_s
    # What overlaps is counted in two phases: then nothing is left.
    seconds[_ELSEWHERE] = max(0.0, whole.wall_s - sum(seconds.values()))
    seconds["stopped"] = whole.stopped_s + standing_s(window)
    return TimeShares(
        wall_s=sum(seconds.values()),
        seconds={name: value for name, value in seconds.items() if value > 0},
        phases={**whole.seconds},
        steps=whole.steps,
    )


def standing_s(window: Window) -> float:
    """For how long no rank has reported a step, by our own clock, where that is unlike this run; else 0. It may
    evaluate, save or hang."""
    took = window.series("step_time_s")
    if took is None or window.ended or not took.ranks:
        return 0.0
    quiet = window.now - max(took.ranks.values())
    return quiet if quiet >= max(_STANDS_S, _STANDS_STEPS * max(took.last(took.size))) else 0.0


def held_back_by(window: Window, shares: TimeShares | None) -> Finding | None:
    """What a verdict must say instead of `healthy`, where no rule found it: anything beside training took a tenth of the
    wall time, or a phase other than compute took a third of the step."""
    if standing_s(window):
        return _standing(window, shares)
    if shares is None or shares.steps < _FEWEST_STEPS:
        return None
    in_steps_s = window.wall.whole().wall_s
    worth = {phase: seconds for phase, seconds in shares.phases.items() if seconds >= _LEAST_S * shares.steps}
    beside = {phase: seconds for phase, seconds in worth.items() if phase not in (*_COMPUTE, *_WITHIN)}
    if beside and sum(beside.values()) >= _NEVER_HEALTHY * shares.wall_s:
        return _on_phase(shares, *max(beside.items(), key=lambda item: item[1]), in_steps_s)
    # where the host only waits for a busy device, the rest of the step is no time of its own
    elsewhere = (share_elsewhere(window) or 0.0) >= _THIRD
    for phase, spent_s in sorted(worth.items(), key=_largest):
        if phase in _WITHIN and spent_s >= _THIRD * in_steps_s and (phase != "other" or elsewhere):
            return _on_phase(shares, phase, spent_s, in_steps_s)
    return _stopped(shares)


def _rule(name: str) -> Rule:
    return next(rule for rule in all_rules() if rule.id == name)


def _on_phase(shares: TimeShares, phase: str, spent_s: float, in_steps_s: float) -> Finding:
    share = 100 * spent_s / in_steps_s
    words = {**_BESIDE, "other": _ELSEWHERE}.get(phase, f"the phase `{phase}`")
    what = words[0].upper() + words[1:]
    took = f"{spell_s(spent_s / shares.steps)} of each step of {spell_s(in_steps_s / shares.steps)}"
    said = f"{what} took {share:.0f} % of the time"
    return _rule(_RULE_OF.get(phase, "unmeasured_time")).found(
        "info",
        said,
        f"{said} of the {shares.steps:,} steps: {took} on average. All of the time: {shares.spelled()}.",
        evidence={"share_pct": share, "seconds": spent_s, "steps": shares.steps, "wall_time_pct": shares.percents()},
        cost=took,
        gain_pct=share,
    )


def _standing(window: Window, shares: TimeShares | None) -> Finding:
    stands_s = standing_s(window)
    return _rule("hang").found(
        "info",
        f"No step has ended for {spell_s(stands_s)}",
        f"No step has ended for {spell_s(stands_s)}, since step {window.step:,}; what it does now is not known yet."
        + ("" if shares is None else f" All of the time: {shares.spelled()}."),
        since_step=window.step,
        fix="If it neither evaluates nor saves now: `perfagent stacks RUN` shows where every thread of every rank stands. Of "
        "several ranks the one whose stack differs is the one that the others wait for; one that waits for its loader has a "
        "worker hanging.",
        evidence={"standing_s": stands_s},
    )


def _stopped(shares: TimeShares) -> Finding | None:
    if shares.share("stopped") < _NEVER_HEALTHY:
        return None
    stopped_s = shares.seconds["stopped"]
    return _rule("process_crash").found(
        "info",
        f"The run stood still for {100 * shares.share('stopped'):.0f} % of its time, between its attempts",
        f"The run stood still for {spell_s(stopped_s)} of the {spell_s(shares.wall_s)} since its first step: it was started "
        f"again. All of the time: {shares.spelled()}.",
        fix="Look at how the attempts before ended (the alerts of the run), and save often enough that a restart repeats little.",
        evidence={"stopped_s": stopped_s, "wall_time_pct": shares.percents()},
    )
