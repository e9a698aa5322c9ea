"""throughput_regression: steps that take longer from some step on, and all that looks like it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from judging import frame, state
from step_job import StepJob

from perfagent.wire import Finding
from perfagent_server.rules.speed.data_bound import DataBound
from perfagent_server.rules.speed.throughput_regression import ThroughputRegression

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


def unfrozen(_step: int, time: float) -> dict[str, float]:
    """Backward takes what a step takes more than 97.5 ms."""
    return {"phase/forward_s": 0.09, "phase/backward_s": time - 0.0975, "phase/data_s": 0.0075}


def phases(_step: int, time: float) -> dict[str, float]:
    """Forward takes what a step takes more than 100 ms."""
    return {"phase/forward_s": time - 0.07, "phase/backward_s": 0.06, "phase/data_s": 0.01}


@pytest.mark.parametrize("rows", [1, 50, 500])
def test_steps_that_take_six_percent_longer_are_found_in_ten(rows: int) -> None:
    job = train(noisy(0.1, 400) + noisy(0.106, 100, seed=1), extra=phases, rows=rows)
    assert 410 <= job.alert.step <= 420
    assert (job.found.severity, job.found.evidence["phase"]) == ("info", "forward"), "it is little, without a GPU"
    assert job.found.since_step == 401
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


def rates(tokens: float = 4096, samples: float = 32, flops: float = 1e12) -> Extra:
    """Of what a step does, from step 301 on."""

    def extra(step: int, time: float) -> dict[str, float]:
        now = (tokens, samples, flops) if step > 300 else (4096, 32, 1e12)
        return {f"{name}_per_s": one / time for name, one in zip(("tokens", "samples", "flops"), now, strict=True)}

    return extra


WORK: dict[str, tuple[Extra, bool]] = {
    "longer sequences": (rates(tokens=8192), False),
    "larger images": (rates(flops=2.1e12), False),
    "half of it is more work": (rates(samples=49), False),
    "less than half": (rates(samples=47), True),
    "the same": (rates(), True),
}


@pytest.mark.parametrize("kind", WORK)
def test_steps_with_more_work_are_no_slower(kind: str) -> None:
    extra, fires = WORK[kind]
    job = train(noisy(0.1, 300) + noisy(0.2, 300, seed=1), extra=extra)
    assert len(job.fired) == fires
    if not fires:  # from then on that is the usual length of a step
        later = train(noisy(0.22, 60, seed=2), job=job, extra=extra).found
        assert later.evidence["times"] == pytest.approx(1.1, abs=0.02)


PAUSED = [*noisy(0.1, 500), *[2.0] * 6, *noisy(0.1, 494)]
EVALUATED = [2.0 if step % 10 < 4 and step > 300 else one for step, one in enumerate(noisy(0.1, 900), 1)]


LIKE_IT: dict[str, tuple[list[float], Extra]] = {
    "evaluations": (EVALUATED, lambda _, time: {"phase/eval_s": time - 0.1 if time > 1 else 0.0}),
    "steps of two kinds": ([0.2 if step * step % 10 > 5 else 0.1 for step in range(3000)], lambda _step, _time: {}),
    "a pause of some steps": (PAUSED, phases),
    "layers that are unfrozen": (noisy(0.1001, 300, noise=0.0005) + noisy(0.15, 300, noise=0.0005, seed=1), unfrozen),
    "too few to judge": (noisy(0.1, 60) + noisy(0.3, 50, seed=1), phases),
    "a slow drift": ([time * (1 + step / 60_000) for step, time in enumerate(noisy(0.15, 3000, noise=0.005))], phases),
    "much noise": (noisy(0.03, 3000, noise=0.5, seed=4), lambda _step, _time: {}),
}


@pytest.mark.parametrize("kind", LIKE_IT)
def test_what_only_looks_slower_is_silent(kind: str) -> None:
    times, extra = LIKE_IT[kind]
    assert train(times, extra=extra, rows=100).changes == []


@pytest.mark.parametrize(("times", "severity"), [(1.13, "info"), (1.17, "critical")])
def test_a_rise_below_15_percent_without_a_gpu_is_a_remark(times: float, severity: str) -> None:
    job = train(noisy(0.1, 400) + noisy(0.1 * times, 200, seed=1), extra=phases)
    assert [one.severity for one in job.evaluator.findings()] == [severity]


def test_a_layer_that_takes_ten_times_as_long_is_no_unfrozen_one() -> None:
    """Its phase was a small part of the step, but not next to nothing."""
    small = lambda _, time: {"phase/forward_s": 0.09, "phase/backward_s": time - 0.095, "phase/data_s": 0.005}  # noqa: E731
    job = train(noisy(0.1, 300, noise=0.005) + noisy(0.15, 300, noise=0.005, seed=1), extra=small, rows=100)
    assert [one.severity for one in job.evaluator.findings()] == ["critical"]


@pytest.mark.parametrize(("unfrozen", "told"), [(True, []), (False, ["critical"])])
def test_a_backward_pass_through_more_layers_is_no_regression(unfrozen: bool, told: list[str]) -> None:
    """Two of five layers are trained, and from step 301 on all: gradients are measured in each 20th step."""
    times = noisy(0.0184, 300) + noisy(0.0318, 300, seed=1)
    columns = {
        "step_time_s": times,
        "phase/forward_s": [0.012] * 600,
        "phase/backward_s": [one - 0.014 for one in times],
    }
    layers = {step: 5 if unfrozen and step > 300 else 2 for step in range(7, 600, 20)}
    norms = {step: {f"grad_norm/layer.{place}": 0.1 for place in range(count)} for step, count in layers.items()}
    done = StepJob(RULE).go_on(columns, step_s=0.02, measured=norms)
    assert [one.severity for one in done.evaluator.findings()] == told


def test_the_first_steps_and_the_attempt_before_do_not_count() -> None:
    evaluator = train(noisy(0.1, 400)).evaluator
    evaluator.take(frame({}, [], attempt=2, ident=1000, events=[state("starting", start_step=401)]))
    times = [30.0, 5.0, 2.0, 1.0, *noisy(0.15, 300)]
    assert evaluator.take(frame({"step_time_s": times}, range(401, 401 + len(times)), ident=1001, attempt=2)) == []


def crowded(
    busy: float, own: float, steps: int, times: float, phases_of: Extra, *, before: int = 300, step_s: float = 0.1
) -> list[tuple[int, Finding]]:
    """A run on two cores that uses one of them; after so many steps the machine is as busy as said, and steps take `times`
    as long. What fired, and its step."""
    job, clock, told = StepJob(RULE), 0.0, 0
    took = noisy(step_s, before, noise=0.03) + noisy(step_s * times, steps, noise=0.03, seed=1)
    for step, time in enumerate(took, 1):
        clock += time
        columns = {"step_time_s": time, **phases_of(step, time)}
        job.go_on({name: [value] for name, value in columns.items()}, step_s=clock / step)
        load = (busy, own) if step > before else (70.0, 99.0)
        readings = {"host/cpu_pct": [load[0]], "process/cpu_pct": [load[1]], "host/cores": [2.0]}
        for second in range(told + 1, int(clock) + 1):
            job.changes += job.evaluator.take(frame(readings, [second], ident=job.evaluator.upto + 1, step_s=1.0))
        told = int(clock)
    return [(change.step, change.finding) for change in job.changes if change.kind in ("fire", "reopen")]


def compute(_step: int, time: float) -> dict[str, float]:
    return {"phase/forward_s": 0.35 * time, "phase/backward_s": 0.6 * time, "phase/optimizer_s": 0.05 * time}


def one(phase: str) -> Extra:
    """It takes what a step takes more than 60 ms."""
    return lambda _, time: {f"phase/{phase}_s": time - 0.06, "phase/backward_s": 0.05, "phase/optimizer_s": 0.01}


@pytest.mark.parametrize(
    ("job", "told", "by_step"),
    [
        ((100.0, 50.0, 290, 2.0, compute), [], 0),  # 58 s
        ((100.0, 50.0, 330, 2.0, compute), [("info", "other programs")], 630),
        ((97.0, 97.0, 300, 1.15, compute), [], 0),  # a neighbour on the other thread of the same core
        ((70.0, 99.0, 200, 1.3, compute), [("info", "every phase")], 325),
        ((100.0, 60.0, 100, 1.5, one("other")), [("warning", "other")], 320),
        ((40.0, 60.0, 200, 1.2, one("forward")), [("info", "no more work")], 330),
        ((40.0, 60.0, 200, 1.5, one("forward")), [("warning", "")], 320),
        ((40.0, 60.0, 200, 1.2, one("comm")), [("warning", "comm")], 330),
        ((75.0, 99.0, 200, 1.5, one("forward")), [("warning", "")], 320),
    ],
    ids=[
        "others, not yet", "others, for a minute", "a neighbour", "not busier", "one phase alone", "a layer that waits",
        "much longer", "ranks that wait", "a layer that works",
    ],
)  # fmt: skip
def test_steps_that_wait_for_cores_of_others_are_a_remark(
    job: tuple[Any, ...], told: list[tuple[str, str]], by_step: int
) -> None:
    found = crowded(*job)
    assert [(one.severity, one.cause) for _, one in found] == told
    assert all(step < by_step for step, _ in found)


def test_a_loader_that_is_told_anyway_is_a_remark() -> None:
    job = StepJob(RULE, DataBound())
    times = [*noisy(0.1, 400), *noisy(0.2, 100, seed=1)]
    train(times, extra=lambda _, time: {"phase/data_s": time - 0.04, "phase/backward_s": 0.04}, job=job)
    assert [(one.finding.rule, one.finding.severity) for one in job.fired] == [
        ("data_bound", "critical"), ("throughput_regression", "info"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("phases", "severity"), [({"phase/backward_s": 0.06, "phase/other_s": 0.03}, "info"), ({}, "critical")]
)
def test_a_rise_that_no_phase_shows_is_the_machines(phases: dict[str, float], severity: str) -> None:
    times = [*noisy(0.1, 400), *noisy(0.13, 200, seed=1)]
    assert {one.finding.severity for one in train(times, extra=lambda *_: phases).changes[-1:]} == {severity}


def test_a_phase_that_grows_alone_shows_through_noise() -> None:
    own = [0.0013 + 0.000036 * step for step in range(700)]
    times = [model + more for model, more in zip(noisy(0.018, 700, noise=0.5), own, strict=True)]
    job = train(
        times, extra=lambda step, time: {"phase/other_s": own[step - 1], "phase/backward_s": time - own[step - 1]}
    )
    assert ("critical", "other") in [(change.finding.severity, change.finding.cause) for change in job.changes]


def rising(steps: int = 400, first: float = 0.05) -> list[float]:
    """Each step takes 2 % of the first one longer than the step before."""
    return [level * (1 + 0.02 * step) for step, level in enumerate(noisy(first, steps, seed=3))]


@pytest.mark.parametrize(
    ("times", "extra", "fires"),
    [
        (rising(400, 0.001), {}, False),  # within a few seconds: a busy machine alone makes such a rise
        (rising(1000, 0.001), {}, True),
        (rising(), {"tokens_per_s": 5000.0}, False),
    ],
    ids=["short", "longer", "with the sequence"],
)
def test_a_rise_is_a_drift_after_some_seconds(times: list[float], extra: dict[str, float], fires: bool) -> None:
    assert bool(train(times, extra=lambda _, time: {"phase/data_s": time, **extra}).fired) == fires


@pytest.mark.parametrize(
    ("phase", "acts", "severity"),
    [("data", {}, "warning"), ("forward", {}, "warning"), ("other", {}, "warning"), ("other", {"phase/rollout_s": 1e-4}, "info")],
)  # fmt: skip
def test_steps_that_get_ever_longer_are_found(phase: str, acts: dict[str, float], severity: str) -> None:
    """Episodes get longer as a model learns to play: a remark."""
    job = train(rising(), extra=lambda _, time: {f"phase/{phase}_s": time - 0.02, "phase/backward_s": 0.02, **acts})
    found = job.fired[0].finding
    assert (found.severity, found.evidence["phase"]) == (severity, phase)
    assert found.gain_pct is not None and found.gain_pct > 30
