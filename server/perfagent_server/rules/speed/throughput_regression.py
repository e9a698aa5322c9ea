"""throughput_regression: from some step on, each step takes longer than before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np

from perfagent.wire import TIMED_PHASES, Finding, Severity
from perfagent_server.rules.rule import UNKNOWN, Life, Question, Rule, Series, Unknown, within
from perfagent_server.rules.speed import cpu_load, drift, step_shares
from perfagent_server.rules.speed.cpu_load import CpuLoad, ranks_of_nodes
from perfagent_server.rules.speed.level_shift import LevelShift, Shift, middle
from perfagent_server.rules.speed.step_shares import UTILIZATION
from perfagent_server.rules.steady_steps import SKIPPED_STEPS
from perfagent_server.rules.window import Window

__all__ = ["ThroughputRegression"]

_FAMILY = "grad_norm/"
_RATES = ("tokens_per_s", "samples_per_s", "flops_per_s")
_TYPICAL_STEPS = 32  # over which phases and rates are noted
_NOTED_EVERY, _MOST_NOTES = 25, 6  # groups of steps between two notes; how many are kept
_BEFORE_S, _READINGS_S = 30.0, 10.0
"""Seconds before the jump that the load of the cores is compared with; for how long a reading of after it is awaited."""
_FULL, _HALF_FULL = 0.8, 0.5
_MORE, _MUCH, _MOST = 0.08, 0.2, 0.5
"""Of all cores: how many are busy; how many more others use than before, and how many at all."""
_LITTLE_TIMES, _SHOWS_TIMES = 1.25, 1.15
"""What others may do beside a run that shares cores with them; what they may do unseen, by the caches and the clock."""
_DRIFT_S = 10.0
"""For how long steps must have grown little by little: within less, a busy machine alone makes such a rise."""
_LEAST_PART = 0.2
"""A phase that grew by less of what the step grew says nothing about it."""
_ALONE = 0.4
"""A phase that grew by so much more than its share of the step grew alone; a crowded machine slows all of them."""
_LEAST_REST = 0.05  # of the step, that the other phases must be to say something
_FAR_MORE = 4.0
"""A phase that grew so many times as much as the others is no matter of a crowded machine, which slows all."""
_OF_THE_MODEL, _NEXT_TO_NOTHING = ("forward", "backward", "optimizer"), 0.04
_OF_GRADIENTS, _GRADIENTS_STEPS = ("backward", "optimizer"), 200
"""Phases that take longer once more layers are trained; for how many steps the next measurement of gradients is awaited."""
_SLOWED_TOGETHER = (*_OF_THE_MODEL, "comm")
"""What a crowded machine slows: on the cores the layers, and the ranks that wait for each other."""
_OF_THE_MACHINE = ("other programs", "every phase", "no more work")
_JUMP_TIMES, _JUMP_SHARE, _FEWEST_NOTES = 1.3, 0.1, 3
"""A phase that jumped: to so many times its highest note, by this share of the step."""


class _Growth(NamedTuple):
    """The phase that grew most, its seconds before and after; whether it grew alone, all others about as much as it did, or
    it far more than they. "" where no phases are known."""

    phase: str = ""
    before_s: float = 0.0
    after_s: float = 0.0
    is_alone: bool = False
    is_everywhere: bool = False
    is_far: bool = False


@dataclass(frozen=True, kw_only=True)
class ThroughputRegression(Rule):
    """The newest steps against those before: level_shift.py has the method and its measurements (six standard errors,
    above any stretch before, ten million to one against chance). drift.py finds a rise that is too slow for a jump.

    If tokens, samples or arithmetic per second stay level, a step has more work: a schedule of the sequence length or
    of the batch. If all cores are full and other programs took more of them as the steps grew, the run itself is no
    slower. What slows a part of the script shows in its phase; where every phase grew, and no GPU is used, it is the
    machine (other programs, other virtual machines of the host, clocks). So it may be without a GPU below 15 %, and where
    steps grew by less than single ones vary. A loader whose steps wait for it anyway (data_bound) is told by that.
    """

    warning_times: float = 1.045
    critical_times: float = 1.10
    critical_steps: int = 50
    steps: int = 20
    before_steps: int = 200
    least_before_steps: int = within(100, least=60, most=10_000)
    least_s: float = 1.0
    others_for_s: float = 60.0

    id: ClassVar[str] = "throughput_regression"
    severities = ("info", "warning", "critical")
    question = Question.IS_IT_FAST
    after = ("low_mfu",)
    reads = (
        Series("step_time_s", merge="median", judged=True),
        *step_shares.READS[1:],
        *(Series(name, merge="sum") for name in _RATES),
        UTILIZATION,
        Series(_FAMILY, keep=8),
        *cpu_load.READS,
    )
    charts = ("step_time_s", "samples_per_s")
    profile_helps = True
    life = Life(clear_steps=10, restated=True)
    state_version = 2

    @cached_property
    def _detector(self) -> LevelShift:
        return LevelShift(
            rise_times=self.warning_times,
            newest=(self.steps, 3 * self.steps),
            before=self.before_steps,
            least_before=self.least_before_steps,
        )

    def judge(self, window: Window) -> Finding | Unknown | None:
        took = window.by_step["step_time_s"]
        value, step, time = took.value, window.at, took.time
        if value is None or time is None or not 0 < value < math.inf or step <= window.start_step + SKIPPED_STEPS:
            return UNKNOWN
        if window.wall.was_interrupted(step):
            return UNKNOWN
        # notes: of typical steps: the first step after it, phases in seconds and rates; load: of the cores before the
        # jump; seen: the step at which that was seen first; drift, early: a slow rise, and what was typical when the run began
        state = window.state_of(
            self,
            {
                "track": LevelShift.fresh(), "notes": [], "until_note": 0, "load": None, "early": None, "seen": None,
                "drift": {**drift.FRESH, "newest": [], "marks": []},
            },
        )  # fmt: skip
        if drift.follow(state["drift"], step, value):
            state["early"] = state["early"] or _typical_now(window, _TYPICAL_STEPS)
        found = self._jumped(window, state, step, time, value)
        return found if isinstance(found, Finding) else self._drifted(window, state, time) or found

    def _jumped(
        self, window: Window, state: dict[str, Any], step: int, time: float, value: float
    ) -> Finding | Unknown | None:
        track, detector = state["track"], self._detector
        if not detector.take(track, step, time, value, value):
            return UNKNOWN
        shift = detector.look(track)
        if shift is None and _note(window, state) and _jumped_alone(state["notes"]):
            # The noise of the whole step may hide what one phase shows clearly.
            shift = detector.look(track) if detector.declare(track, _TYPICAL_STEPS // track["size"]) else None
        if shift is None:
            state["load"] = state["seen"] = None
            return None if detector.knows_enough(track) else UNKNOWN
        return self._judge_jump(window, state, shift, time)

    def _drifted(self, window: Window, state: dict[str, Any], time: float) -> Finding | None:
        """Only a remark where the script's own code grew and its model acts: episodes get longer as it learns to play."""
        found = drift.drift(state["drift"]) if state["drift"]["marks"] else None
        if found is None:
            return None
        step, usual, level = found
        if (window.at - step) * (usual + level) / 2 < _DRIFT_S:
            return None
        after = _typical_now(window, _TYPICAL_STEPS)
        if _has_more_work(state["early"], after, level / usual):
            return None
        growth = _growth(state["early"], after, level - usual)
        is_crowded = cpu_load.is_crowded(window, time)
        plays = growth.phase == "rollout" or (growth.phase == "other" and window.wall.whole().acts)
        is_own = not growth.phase or plays or _is_told(window, growth)
        cause = "other programs" if is_crowded and not growth.is_alone else _cause(window, growth)
        severity: Severity = "info" if is_own or cause in _OF_THE_MACHINE else "warning"
        return self._finding(severity, cause, growth, step, usual, level, {"drifted_steps": window.at - step})

    def _judge_jump(self, window: Window, state: dict[str, Any], shift: Shift, time: float) -> Finding | Unknown | None:
        before: dict[str, float] = next((note[1] for note in reversed(state["notes"]) if note[0] <= shift.step), {})
        after = _typical_now(window, max(self.steps // 2, min(_TYPICAL_STEPS, shift.groups * shift.size)))
        if _has_more_work(before, after, shift.times):
            self._detector.accept(state["track"])
            return None
        growth = _growth(before, after, shift.level - shift.before)
        if growth.phase in _OF_THE_MODEL and growth.before_s < _NEXT_TO_NOTHING * shift.before:
            self._detector.accept(state["track"])  # layers were unfrozen
            return None
        trains_more = growth.phase in _OF_GRADIENTS and _trains_more_layers(window, state, shift.step)
        if trains_more is None:
            return UNKNOWN
        if trains_more:
            self._detector.accept(state["track"])
            return None
        loads = self._loads(window, state, shift, time)
        if loads is None:
            return UNKNOWN
        if not window.is_firing(self.id) and (shift.times < self.warning_times or time - shift.time < self.least_s):
            return None
        is_crowded = any(_is_crowded(now, *before, shift.times) for before, now in loads)
        if is_crowded and not growth.is_far and (not growth.is_alone or growth.phase in _SLOWED_TOGETHER):
            if time - shift.time < self.others_for_s:
                return None
            cause = "other programs"
        elif growth.phase in _OF_THE_MODEL and shift.times < _LITTLE_TIMES and _waits(loads, shift.times):
            cause = "no more work"
        else:
            cause = _cause(window, growth)
        is_critical = shift.times >= self.critical_times and shift.groups >= self.critical_steps
        beyond = max(_SHOWS_TIMES, 1 + shift.noise)  # of the single steps before
        # what slows a part of a script without a GPU shows in its phase; where no phases are known, any rise counts
        shows = growth.phase and shift.times >= beyond
        is_noise = UTILIZATION.name not in window.by_time and not shows and any(name not in _RATES for name in after)
        is_remark = cause in _OF_THE_MACHINE or is_noise or _is_told(window, growth)
        severity: Severity = "info" if is_remark else "critical" if is_critical else "warning"
        figures = {"noise_share": shift.noise, "steps": shift.groups * shift.size, "cores_before": state["load"]}
        return self._finding(severity, cause, growth, shift.step, shift.before, shift.level, figures)

    def _loads(
        self, window: Window, state: dict[str, Any], shift: Shift, time: float
    ) -> list[tuple[tuple[float, float], CpuLoad]] | None:
        """Of the nodes of a run without GPU: cores that it and others used before the jump, and the load now. None while no
        reading has come of the time after the jump, and where none had come before it."""
        nodes = [] if UTILIZATION.name in window.by_time else ranks_of_nodes(window)
        if state["load"] is None:
            known = (cpu_load.cpu_load(window, node, shift.time - _BEFORE_S, shift.time - 1.0) for node in nodes)
            state["load"] = [[load.own, load.others] if load is not None else [] for load in known]
        found = []
        for node, before in zip(nodes, state["load"], strict=False):
            now = cpu_load.cpu_load(window, node, max(shift.time + 1.0, time - _BEFORE_S), time)
            if now is not None and before:
                found.append((before, now))
            elif now is not None or time - shift.time < _READINGS_S:
                return None
        return found

    def _finding(
        self,
        severity: Severity,
        cause: str,
        growth: _Growth,
        step: int,
        before_s: float,
        now_s: float,
        figures: dict[str, Any],
    ) -> Finding:
        times, lost_s = now_s / before_s, now_s - before_s
        return self.found(
            severity,
            cause=cause,
            since_step=step,
            evidence={
                "step": step, "step_time_s": now_s, "before_s": before_s, "lost_s": lost_s, "times": times,
                "longer_pct": 100 * (times - 1), "phase": growth.phase, "phase_before_s": growth.before_s,
                "phase_after_s": growth.after_s, **figures,
            },
            gain_pct=100 * (1 - 1 / times),
        )  # fmt: skip


def _trains_more_layers(window: Window, state: dict[str, Any], since: int) -> bool | None:
    """Whether more layers have a gradient than before this step. None while none was measured since the jump was seen."""
    family = window.by_family.get(_FAMILY)
    if state["seen"] is None:
        state["seen"] = window.at
    if family is None or window.at - state["seen"] > _GRADIENTS_STEPS:
        return False
    _, steps, norms = family.matrix(window.step)
    trained = np.count_nonzero(norms > 0, axis=0)  # NaN is not
    before = [count for step, count in zip(steps, trained, strict=True) if step < since]
    now = [count for step, count in zip(steps, trained, strict=True) if step >= state["seen"]]
    return bool(now[-1] > before[-1]) if before and now else None if before else False


def _note(window: Window, state: dict[str, Any]) -> bool:
    """Now and then, what is typical: of the steps before a jump the series are gone when it is sure. Whether it is now."""
    state["until_note"] -= 1
    if state["until_note"] >= 0:
        return False
    state["until_note"] = _NOTED_EVERY - 1
    state["notes"].append([window.at + 1, _typical_now(window, _TYPICAL_STEPS)])
    del state["notes"][:-_MOST_NOTES]
    return True


def _jumped_alone(notes: list[tuple[int, dict[str, float]]]) -> bool:
    """Whether one phase is far above all its notes but the newest two, while no other grew like it."""
    now, earlier = notes[-1][1], [note for _, note in notes[:-2]]
    if len(earlier) < _FEWEST_NOTES:
        return False
    known = [name for name in now if name not in _RATES and all(name in note for note in earlier)]
    usual = {name: middle([note[name] for note in earlier]) for name in known}
    whole = sum(now[name] for name in known)
    growth = _growth(usual, now, whole - sum(usual.values()))
    highest = max(note.get(f"phase/{growth.phase}_s", math.inf) for note in earlier)
    is_far = growth.after_s >= _JUMP_TIMES * highest and growth.after_s - growth.before_s >= _JUMP_SHARE * whole
    return is_far and growth.after_s <= (1 - _LEAST_REST) * whole and not growth.is_everywhere


def _typical_now(window: Window, steps: int) -> dict[str, float]:
    """Medians of the phases, and of the tokens, samples and FLOPs of a step (under the names of their rates), over the
    newest steps up to the one under judgment."""
    found, took = {}, window.by_step["step_time_s"]
    for name in (*(f"phase/{phase}_s" for phase in TIMED_PHASES if phase not in step_shares.PAUSES), *_RATES):
        series = window.by_step.get(name)
        values = series.before(window.at, steps) if series is not None else []
        if series is not None and name in _RATES:
            same = series.steps_before(window.at, steps) == took.steps_before(window.at, steps)
            values = (
                [rate * time for rate, time in zip(values, took.before(window.at, steps), strict=True)] if same else []
            )
        known = [one for one in values if math.isfinite(one)]
        if known:
            found[name] = middle(known)
    return found


def _has_more_work(before: dict[str, float], after: dict[str, float], times: float) -> bool:
    """Whether a step takes longer because there is more in it: by half of what it takes longer, at least."""
    least = 1 + 0.5 * (times - 1)
    return any(after[name] >= least * before[name] > 0 for name in _RATES if name in before and name in after)


def _growth(before: dict[str, float], after: dict[str, float], more_s: float) -> _Growth:
    """more_s: that the whole step grew."""
    grown = {name: after[name] - before[name] for name in before if name in after and name not in _RATES}
    whole = sum(before[name] for name in grown)
    if not grown or whole <= 0:
        return _Growth()
    most = max(grown, key=lambda name: grown[name])
    if grown[most] <= _LEAST_PART * more_s:
        return _Growth()
    total, rest = sum(grown.values()), whole - before[most]
    others_times = (rest + total - grown[most]) / rest if rest >= _LEAST_REST * whole else math.inf
    is_far = after[most] >= _FAR_MORE * max(1.0, others_times) * before[most] > 0
    is_alone = is_far or grown[most] / max(more_s, total) - before[most] / whole >= _ALONE
    grew_alike = (total - grown[most]) * before[most] >= 0.5 * grown[most] * rest
    is_everywhere = before[most] > 0 and rest >= _LEAST_REST * whole and grew_alike
    phase = most.removeprefix("phase/").removesuffix("_s")
    return _Growth(phase, before[most], after[most], is_alone, is_everywhere, is_far)


def _cause(window: Window, growth: _Growth) -> str:
    if growth.is_everywhere and UTILIZATION.name not in window.by_time:
        return "every phase"
    return growth.phase if growth.phase in ("data", "comm", "other", "backward") else ""


def _is_told(window: Window, growth: _Growth) -> bool:
    """Whether it is the wait for data, of which data_bound tells already."""
    return growth.phase == "data" and window.is_firing("data_bound")


def _waits(loads: list[tuple[tuple[float, float], CpuLoad]], times: float) -> bool:
    """Whether the processes use hardly more of a core per step than before: no layer has more to do, and the time went to
    somebody else."""
    return bool(loads) and all(now.own * times <= own * (1 + 0.5 * (times - 1)) for (own, _), now in loads)


def _is_crowded(now: CpuLoad, own_before: float, others_before: float, times: float) -> bool:
    """Whether others took from the run: the cores are full and it gets less of them than before, or others use more.
    Where others use a good part of them all the time, a little more or less speed is theirs, too; where they use most
    of full cores, any speed."""
    is_starved = now.busy >= _FULL * now.cores and now.own * times <= own_before * (1 + 0.25 * (times - 1))
    is_fuller = now.busy >= _HALF_FULL * now.cores and now.others - others_before >= _MORE * now.cores
    is_shared = now.busy >= _HALF_FULL * now.cores and now.others >= _MUCH * now.cores and times < _LITTLE_TIMES
    is_theirs = now.busy >= _FULL * now.cores and now.others >= _MOST * now.cores
    return is_starved or is_fuller or is_shared or is_theirs
