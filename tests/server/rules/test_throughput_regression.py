"""throughput_regression: steps that take longer from some step on, and all that looks like it."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from case_selection import everyday
from judging import frame, state
from step_job import StepJob

from perfagent.wire import Finding
from perfagent_server.backtest.replay import replay
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.throughput_regression import ThroughputRegression

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / folder) for folder in ("detection", "")]

import records  # noqa: E402
import throughput  # noqa: E402

RULE = ThroughputRegression()
Extra = Callable[[int, float], dict[str, float]]


def train(
    times: Sequence[float], *, extra: Extra = lambda _step, _time: {}, job: StepJob | None = None, rows: int = 20,
    restarts: int = 7,
) -> StepJob:  # fmt: skip
    """Steps that take so long. extra: other series of a step, of its number and time."""
    job = job or StepJob(RULE, restarts=restarts)
    told = [extra(step, time) for step, time in enumerate(times, job.step + 1)]
    columns = {name: [one[name] for one in told] for name in told[0]}
    step_s = sorted(times)[len(times) // 2]
    return job.go_on({"step_time_s": times, **columns}, rows=rows, step_s=step_s)


def noisy(level: float, steps: int, *, noise: float = 0.01, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + noise * abs(draw.gauss(0, 1))) for _ in range(steps)]


def phases(_step: int, time: float) -> dict[str, float]:
    """Forward takes what a step takes more than 100 ms."""
    return {"phase/forward_s": time - 0.07, "phase/backward_s": 0.06, "phase/data_s": 0.01}


@pytest.mark.parametrize("rows", [1, 50, 500])
def test_steps_that_take_six_percent_longer_are_found_in_ten(rows: int) -> None:
    job = train(noisy(0.1, 400) + noisy(0.106, 100, seed=1), extra=phases, rows=rows)
    assert 410 <= job.alert.step <= 420
    assert (job.found.severity, job.found.evidence["phase"]) == ("warning", "forward")
    assert 398 <= (job.found.since_step or 0) <= 403
    assert job.found.gain_pct == pytest.approx(5.7, abs=0.6)
    assert job.found.evidence["phase_before_s"] == pytest.approx(0.0306, abs=0.001)


@pytest.mark.parametrize(
    ("times", "steps", "severity"),
    [
        (1.044, 100, None),
        (1.046, 100, "warning"),
        (1.099, 100, "warning"),
        (1.101, 49, "warning"),
        (1.101, 51, "critical"),
    ],
)
def test_a_tenth_is_critical_once_it_has_lasted_for_fifty_steps(times: float, steps: int, severity: str | None) -> None:
    job = train([0.1] * 300 + [0.1 * times] * steps, rows=1)
    assert [one.severity for one in job.evaluator.findings()] == ([severity] if severity else [])


def test_the_alert_stays_until_the_steps_are_as_fast_as_before() -> None:
    job = train(noisy(0.1, 300) + noisy(0.12, 1000, seed=1), rows=1)
    [open_] = job.evaluator.findings()
    assert open_.since_step in range(299, 304)
    train(noisy(0.1, 200, seed=2), job=job, rows=1)
    assert job.kinds == ["fire", "resolve"]
    train(noisy(0.112, 20, seed=3), job=job, rows=1)
    assert [(change.kind, change.step) for change in job.changes[-1:]] == [("reopen", 1511)]


def test_a_restart_of_the_server_changes_no_judgment() -> None:
    times = noisy(0.1, 400) + noisy(0.107, 100, seed=1)
    whole, pieces = (train(times, rows=1, restarts=restarts).changes for restarts in (0, 37))
    assert (
        [(one.step, one.alert, one.finding) for one in pieces]
        == [(one.step, one.alert, one.finding) for one in whole]
        != []
    )


@pytest.mark.parametrize("step_s", [0.005, 0.2])
def test_half_a_step_more_is_found_however_short_the_steps(step_s: float) -> None:
    job = train(noisy(step_s, 250, noise=0.1) + noisy(1.5 * step_s, 250, noise=0.1, seed=1), rows=5)
    assert len(job.fired) == 1
    assert job.evaluator.findings()[0].severity == "critical"


def test_slower_steps_with_the_same_work_are_slower() -> None:
    rates = {"tokens_per_s": 4096.0, "samples_per_s": 4.0, "flops_per_s": 1e12}
    times = noisy(0.1, 300) + noisy(0.108, 100, seed=1)
    assert len(train(times, extra=lambda _, time: {name: value / time for name, value in rates.items()}).fired) == 1


# ---- what looks like it

WORK: dict[str, Extra] = {
    "longer sequences": lambda step, time: {
        "tokens_per_s": (4096 if step <= 300 else 8192) / time, "samples_per_s": 4 / time,
    },
    "larger batches": lambda step, time: {"samples_per_s": (32 if step <= 300 else 64) / time},
    "larger images": lambda step, time: {
        "samples_per_s": 32 / time, "flops_per_s": (1e12 if step <= 300 else 2.1e12) / time,
    },
    "half of it is more work": lambda step, time: {"samples_per_s": (32 if step <= 300 else 49) / time},
}  # fmt: skip


@pytest.mark.parametrize("kind", WORK)
def test_steps_with_more_work_are_no_slower(kind: str) -> None:
    job = train(noisy(0.1, 300) + noisy(0.2, 300, seed=1), extra=WORK[kind])
    assert job.changes == []
    # from then on that is the usual length of a step
    assert train(noisy(0.22, 60, seed=2), job=job, extra=WORK[kind]).found.evidence["times"] == pytest.approx(
        1.1, abs=0.02
    )


def test_less_than_half_of_the_growth_is_no_excuse() -> None:
    less = lambda step, time: {"samples_per_s": (32 if step <= 300 else 47) / time}  # noqa: E731
    assert len(train(noisy(0.1, 300) + noisy(0.2, 100, seed=1), extra=less).fired) == 1


DRAW = random.Random(4)
PAUSED = [*noisy(0.1, 500), *[2.0] * 6, *noisy(0.1, 494)]
EVALUATED = [2.0 if step % 10 < 4 and step > 300 else one for step, one in enumerate(noisy(0.1, 900), 1)]
LIKE_IT: dict[str, tuple[list[float], Extra]] = {
    "evaluations": (EVALUATED, lambda _, time: {"phase/eval_s": time - 0.1 if time > 1 else 0.0}),
    "steps of two kinds": ([0.2 if DRAW.random() < 0.3 else 0.1 for _ in range(3000)], lambda _step, _time: {}),
    "a pause of some steps": (PAUSED, phases),
    "too few to judge": (noisy(0.1, 60) + noisy(0.3, 50, seed=1), phases),
    **{
        f"{name} noise{', and a slow drift' if drifts else ''}": (
            [
                time * (1 + drifts * step / 60_000)
                for step, time in enumerate(noisy(level, 3000, noise=noise, seed=len(name)))
            ],
            lambda _step, _time: {},
        )
        for name, level, noise in (
            ("little", 0.15, 0.005),
            ("some", 0.005, 0.2),
            ("much", 0.03, 0.5),
            ("very much", 0.3, 1.0),
        )
        for drifts in (0, 1)
    },
}


@pytest.mark.parametrize("kind", LIKE_IT)
def test_what_only_looks_slower_is_silent(kind: str) -> None:
    times, extra = LIKE_IT[kind]
    assert train(times, extra=extra, rows=100).changes == []


def test_the_first_steps_and_the_attempt_before_do_not_count() -> None:
    evaluator = train(noisy(0.1, 400)).evaluator
    evaluator.take(frame({}, [], attempt=2, ident=1000, events=[state("starting", start_step=401)]))
    times = [30.0, 5.0, 2.0, 1.0, *noisy(0.15, 300)]
    assert evaluator.take(frame({"step_time_s": times}, range(401, 401 + len(times)), ident=1001, attempt=2)) == []


# ---- other programs on the machine


def crowded(
    busy: float, own: float, steps: int, times: float, phases_of: Extra, *, before: int = 300, step_s: float = 0.1
) -> list[tuple[int, Finding]]:
    """A run on two cores that uses one of them; after so many steps the machine is as busy as said, and steps take `times`
    as long. What fired, and its step."""
    job = StepJob(RULE)
    clock, told = 0.0, 0
    took = noisy(step_s, before, noise=0.03) + noisy(step_s * times, steps, noise=0.03, seed=1)
    for step, time in enumerate(took, 1):
        clock += time
        columns = {"step_time_s": time, **phases_of(step, time)}
        job.go_on({name: [value] for name, value in columns.items()}, step_s=clock / step)
        for second in range(told + 1, int(clock) + 1):
            told = second
            load = {"host/cpu_pct": busy if step > before else 70.0, "process/cpu_pct": own if step > before else 99.0}
            readings = {name: [value] for name, value in {**load, "host/cores": 2.0}.items()}
            job.changes += job.evaluator.take(frame(readings, [second], ident=job.evaluator.upto + 1, step_s=1.0))
    return [(change.step, change.finding) for change in job.changes if change.kind in ("fire", "reopen")]


def compute(_step: int, time: float) -> dict[str, float]:
    return {"phase/forward_s": 0.35 * time, "phase/backward_s": 0.6 * time, "phase/optimizer_s": 0.05 * time}


def forward(_step: int, time: float) -> dict[str, float]:
    return {"phase/forward_s": time - 0.06, "phase/backward_s": 0.05, "phase/optimizer_s": 0.01}


@pytest.mark.parametrize(
    ("job", "told", "by_step"),
    [
        ((100.0, 50.0, 290, 2.0, compute), [], None),  # 58 s
        ((100.0, 50.0, 330, 2.0, compute), [("info", "other programs", "")], 630),
        ((97.0, 97.0, 300, 1.15, compute), [], None),  # a neighbour on the other thread of the same core
        ((70.0, 99.0, 200, 1.3, compute), [("warning", "", "backward")], 325),
        ((100.0, 60.0, 100, 1.5, forward), [("warning", "", "forward")], 320),
    ],
    ids=["others, not yet", "others, for a minute", "a neighbour", "not busier", "one phase alone"],
)
def test_steps_that_wait_for_cores_of_others_are_a_remark(
    job: tuple[Any, ...], told: list[tuple[str, str, str]], by_step: int | None
) -> None:
    found = crowded(*job)
    assert [(one.severity, one.cause, one.evidence["phase"]) for _, one in found][: len(told)] == [
        (severity, cause, found[0][1].evidence["phase"] if cause else phase) for severity, cause, phase in told
    ]
    assert len(found) == len(told)
    assert all(step < (by_step or 0) for step, _ in found)


def test_a_jump_before_the_load_of_the_cores_was_read_is_not_judged() -> None:
    """The whole run takes two seconds, on a machine that others use: nobody can tell whose the slower steps are."""
    assert crowded(100.0, 50.0, 300, 2.0, compute, before=200, step_s=0.003) == []


def test_a_phase_that_jumps_alone_is_seen_through_the_noise() -> None:
    """As on a crowded machine, whose load comes and goes: all phases wander, and one of them doubles."""
    draw = random.Random(5)

    def steps(first: int, count: int, seconds: float) -> list[dict[str, float]]:
        loads = [1 + 0.25 * math.sin(step / 25) + draw.gauss(0, 0.05) for step in range(first, first + count)]
        return [{"phase/forward_s": seconds * load, "phase/backward_s": 0.13 * load} for load in loads]

    def judged(took: list[dict[str, float]]) -> StepJob:
        return train([sum(one.values()) for one in took], extra=lambda step, _: took[step - 1], rows=1)

    job = judged([*steps(1, 300, 0.07), *steps(301, 150, 0.14)])
    assert 320 <= job.alert.step <= 350
    assert 295 <= (job.found.since_step or 0) <= 305
    assert job.found.evidence["phase"] == "forward"
    assert judged(steps(1, 600, 0.07)).changes == []


# ---- recorded runs


def test_recorded_healthy_runs_are_silent() -> None:
    """A few of them; benchmarks/detection judges all."""
    for record in [*records.curves()[2:7:4], *records.mlperf()[:3]]:
        assert replay(record.moments, Plan((RULE,))).alerts == [], record.name


def test_the_functions_that_measure_recall_do() -> None:
    found, total, latencies = throughput.drops(5.7, seed=1, draws=4)
    assert (found, total) == (4, 4)
    assert max(latencies) <= 20
    assert throughput.healthy(jobs=1, steps=600) == (0, 600)


# ---- a slow rise


def rising(steps: int = 400, first: float = 0.05) -> list[float]:
    """Each step takes 2 % of the first one longer than the step before."""
    return [level * (1 + 0.02 * step) for step, level in enumerate(noisy(first, steps, seed=3))]


@pytest.mark.parametrize(("phase", "severity"), [("data", "warning"), ("forward", "warning"), ("other", "info")])
def test_steps_that_get_ever_longer_are_found(phase: str, severity: str) -> None:
    found = (
        train(rising(), extra=lambda _, time: {f"phase/{phase}_s": time - 0.02, "phase/backward_s": 0.02})
        .fired[0]
        .finding
    )
    assert (found.severity, found.evidence["phase"]) == (severity, phase)
    assert found.gain_pct is not None and found.gain_pct > 30


@pytest.mark.parametrize(("steps", "fires"), [(400, False), (1000, True)])
def test_a_rise_within_a_few_seconds_is_no_drift(steps: int, fires: bool) -> None:
    """Steps of some milliseconds, as of an example: a busy machine alone makes such a rise."""
    assert bool(train(rising(steps, 0.001), extra=lambda _, time: {"phase/data_s": time}).fired) == fires


def test_steps_that_get_longer_with_the_sequence_are_silent() -> None:
    assert train(rising(), extra=lambda _, time: {**phases(0, time), "tokens_per_s": 5000.0}).fired == []


@pytest.mark.parametrize("seed", everyday(3, range(20)))
def test_a_noisy_run_of_any_length_does_not_drift(seed: int) -> None:
    draw = random.Random(seed)
    times, level = [], 0.1
    for _ in range(1500):
        level *= math.exp(draw.gauss(0, 0.01))  # a machine whose load wanders
        times.append(level * math.exp(abs(draw.gauss(0, 0.1))))
    assert all(change.finding.since_step not in (16, 32, 64, 128) for change in train(times, extra=phases).fired)
