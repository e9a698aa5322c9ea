"""throughput_regression: steps that take longer from some step on, and all that looks like it."""

from __future__ import annotations

import math
import random
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from judging import fired, frame, make_evaluator, restored, state

from perfagent.wire import Finding
from perfagent_server.alerts.state_machine import Change
from perfagent_server.backtest.replay import replay
from perfagent_server.engine.evaluator import Evaluator
from perfagent_server.rules.plan import Plan
from perfagent_server.rules.speed.throughput_regression import ThroughputRegression

sys.path[:0] = [str(Path(__file__).parents[3] / "benchmarks" / folder) for folder in ("detection", "")]

import records  # noqa: E402
import throughput  # noqa: E402

RULE = ThroughputRegression()
Extra = Callable[[int, float], dict[str, float]]


def train(
    times: Sequence[float],
    *,
    extra: Extra = lambda _step, _time: {},
    evaluator: Evaluator | None = None,
    first: int = 1,
    rows: int = 1,
) -> tuple[list[Change], Evaluator]:
    """Steps that take so long, in frames of `rows` steps. extra: other series of a step, of its number and time."""
    evaluator = evaluator or make_evaluator(rules=(RULE,))
    changes: list[Change] = []
    step_s = sorted(times)[len(times) // 2]
    for begin in range(0, len(times), rows):
        steps = range(first + begin, first + min(begin + rows, len(times)))
        columns: dict[str, list[float]] = {"step_time_s": [times[step - first] for step in steps]}
        for step in steps:
            for name, value in extra(step, times[step - first]).items():
                columns.setdefault(name, []).append(value)
        changes += evaluator.take(frame(columns, steps, ident=evaluator.upto + 1, step_s=step_s))
    return changes, evaluator


def noisy(level: float, steps: int, *, noise: float = 0.01, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + noise * abs(draw.gauss(0, 1))) for _ in range(steps)]


def phases(_step: int, time: float) -> dict[str, float]:
    """Forward takes what a step takes more than 100 ms."""
    return {"phase/forward_s": time - 0.07, "phase/backward_s": 0.06, "phase/data_s": 0.01}


def test_steps_that_take_six_percent_longer_are_found_in_ten_steps_with_the_phase_and_the_step() -> None:
    changes, _ = train(noisy(0.1, 400) + noisy(0.106, 100, seed=1), extra=phases)
    [change] = fired(changes)
    found = change.finding
    assert 410 <= change.step <= 420
    assert found.severity == "warning"
    assert 398 <= (found.since_step or 0) <= 403
    assert "of the steps before (P50 of up to 200). Forward grew most, from 30.5 ms to 36." in found.message
    assert "(P50; P90 107 ms) since step 401, " in found.message
    assert found.evidence["phase"] == "forward"
    assert found.gain_pct == pytest.approx(5.7, abs=0.6)


def test_steps_that_take_twelve_times_as_long_are_said_in_plain_digits() -> None:
    changes, _ = train(noisy(0.1, 400) + noisy(1.2, 60, seed=1))
    found = fired(changes)[0].finding
    assert re.search(r"take 1,?\d{3} % longer", found.title), found.title
    assert "e+" not in found.title + found.message


def test_a_tenth_is_critical_once_it_has_lasted_for_fifty_steps() -> None:
    changes, evaluator = train(noisy(0.1, 300) + noisy(0.12, 40, seed=1))
    assert [change.finding.severity for change in fired(changes)] == ["warning"]
    _, evaluator = train(noisy(0.12, 30, seed=2), evaluator=evaluator, first=341)
    assert evaluator.findings()[0].severity == "critical"


def test_the_alert_stays_until_the_steps_are_as_fast_as_before() -> None:
    _, evaluator = train(noisy(0.1, 300) + noisy(0.12, 1000, seed=1))
    [open_] = evaluator.findings()
    assert open_.since_step in range(299, 304)
    changes, evaluator = train(noisy(0.1, 200, seed=2), evaluator=evaluator, first=1301)
    assert [change.kind for change in changes if change.kind != "update"] == ["resolve"]
    changes, _ = train(noisy(0.112, 20, seed=3), evaluator=evaluator, first=1501)
    assert [(change.kind, change.step) for change in changes] == [("reopen", 1511)]


def test_a_server_that_is_restarted_in_the_middle_goes_on_where_it_was() -> None:
    times = noisy(0.1, 400) + noisy(0.107, 100, seed=1)
    whole, _ = train(times)
    evaluator: Evaluator | None = None
    pieces: list[Change] = []
    for begin in range(0, len(times), 37):
        changes, evaluator = train(times[begin : begin + 37], evaluator=evaluator, first=begin + 1)
        pieces += changes
        evaluator = restored(evaluator)
    assert [(change.step, change.alert) for change in fired(pieces)] == [
        (change.step, change.alert) for change in fired(whole)
    ]


@pytest.mark.parametrize("rows", [1, 50, 500])
def test_it_does_not_matter_how_many_steps_come_at_once(rows: int) -> None:
    [change] = fired(train(noisy(0.1, 400) + noisy(0.107, 100, seed=1), extra=phases, rows=rows)[0])
    assert 410 <= change.step <= 420
    assert change.finding.evidence["phase"] == "forward"


@pytest.mark.parametrize("step_s", [0.005, 0.03, 0.2])
def test_half_a_step_more_is_found_in_a_run_of_five_hundred_steps_however_short_they_are(step_s: float) -> None:
    changes, evaluator = train(noisy(step_s, 250, noise=0.1) + noisy(1.5 * step_s, 250, noise=0.1, seed=1))
    assert len(fired(changes)) == 1
    assert evaluator.findings()[0].severity == "critical"


# ---- what looks like it


def sequence_schedule(step: int, time: float) -> dict[str, float]:
    """The sequences double at step 301."""
    tokens = 4096.0 if step <= 300 else 8192.0
    return {"tokens_per_s": tokens / time, "samples_per_s": 4 / time}


def batch_ramp(step: int, time: float) -> dict[str, float]:
    return {"samples_per_s": (32 if step <= 300 else 64) / time}


def larger_images(step: int, time: float) -> dict[str, float]:
    return {"samples_per_s": 32 / time, "flops_per_s": (1e12 if step <= 300 else 2.1e12) / time}


@pytest.mark.parametrize("work", [sequence_schedule, batch_ramp, larger_images])
def test_steps_with_more_work_are_no_slower(work: Extra) -> None:
    times = noisy(0.1, 300) + noisy(0.2, 300, seed=1)
    changes, evaluator = train(times, extra=work)
    assert changes == []
    # from then on that is the usual length of a step
    [change] = fired(train(noisy(0.22, 60, seed=2), evaluator=evaluator, first=601, extra=work)[0])
    assert change.finding.evidence["times"] == pytest.approx(1.1, abs=0.02)


def test_slower_steps_with_the_same_work_are_slower_whatever_rates_are_known() -> None:
    rates = {"tokens_per_s": 4096.0, "samples_per_s": 4.0, "flops_per_s": 1e12}
    times = noisy(0.1, 300) + noisy(0.108, 100, seed=1)
    changes, _ = train(times, extra=lambda _, time: {name: value / time for name, value in rates.items()})
    assert len(fired(changes)) == 1


def test_evaluations_and_saves_are_no_slower_steps() -> None:
    times = [2.0 if step % 10 < 4 and step > 300 else one for step, one in enumerate(noisy(0.1, 900), 1)]
    changes, _ = train(times, extra=lambda _, time: {"phase/eval_s": time - 0.1} if time > 1 else {"phase/eval_s": 0.0})
    assert changes == []


def test_the_first_steps_of_an_attempt_and_those_of_the_attempt_before_do_not_count() -> None:
    _, evaluator = train(noisy(0.1, 400))
    evaluator.take(frame({}, [], attempt=2, ident=1000, events=[state("starting", start_step=401)]))
    changes: list[Change] = []
    for step, time in enumerate([30.0, 5.0, 2.0, 1.0, *noisy(0.15, 300)], 401):
        changes += evaluator.take(frame({"step_time_s": [time]}, [step], ident=1000 + step, attempt=2))
    assert changes == []


def drifting(step: int) -> float:
    return 1 + 0.1 * (step % 6000) / 6000


@pytest.mark.parametrize(
    ("name", "level", "noise"),
    [
        ("quiet", 0.15, 0.005),
        ("jitter of 20 % on short steps", 0.005, 0.2),
        ("noisy", 0.03, 0.5),
        ("very noisy", 0.3, 1.0),
    ],
)
@pytest.mark.parametrize("drifts", [False, True])
def test_noise_and_a_slow_drift_are_silent(name: str, level: float, noise: float, drifts: bool) -> None:
    times = noisy(level, 6000, noise=noise, seed=len(name))
    changes, _ = train([time * (drifting(step) if drifts else 1.0) for step, time in enumerate(times)], rows=100)
    assert changes == []


def test_steps_of_two_kinds_in_any_order_are_silent() -> None:
    draw = random.Random(4)
    times = [0.2 if draw.random() < 0.3 else 0.1 for _ in range(6000)]
    assert train(times, rows=100)[0] == []


def test_a_pause_of_some_steps_is_no_lower_speed() -> None:
    times = noisy(0.1, 1000)
    times[500:506] = [2.0] * 6
    assert train(times)[0] == []


def test_a_hundred_steps_are_too_few_to_judge() -> None:
    assert train(noisy(0.1, 60) + noisy(0.3, 50, seed=1))[0] == []


# ---- other programs on the machine


def crowded(
    *,
    busy_after: float,
    own_after: float,
    steps_after: int,
    times: float,
    phases_of: Extra,
    steps_before: int = 300,
    step_s: float = 0.1,
) -> list[tuple[int, Finding]]:
    """A run on two cores that uses one of them: after steps_before the machine is as busy as said, and steps take `times`
    as long. Returns what fired, and its step."""
    evaluator = make_evaluator(rules=(RULE,))
    changes: list[Change] = []
    clock, ident, told = 0.0, 0, 0
    took = noisy(step_s, steps_before, noise=0.03) + noisy(step_s * times, steps_after, noise=0.03, seed=1)
    for step, time in enumerate(took, 1):
        clock += time
        columns = {"step_time_s": [time], **{name: [value] for name, value in phases_of(step, time).items()}}
        ident += 1
        changes += evaluator.take(frame(columns, [step], ident=ident, step_s=clock / step))
        while told < int(clock):
            told += 1
            is_after = step > steps_before
            load = {
                "host/cpu_pct": busy_after if is_after else 70.0,
                "process/cpu_pct": own_after if is_after else 99.0,
            }
            columns = {name: [value] for name, value in {**load, "host/cores": 2.0}.items()}
            ident += 1
            changes += evaluator.take(frame(columns, [told], ident=ident, step_s=1.0))
    return [(change.step, change.finding) for change in changes if change.kind in ("fire", "reopen")]


def compute(_step: int, time: float) -> dict[str, float]:
    return {"phase/forward_s": 0.35 * time, "phase/backward_s": 0.6 * time, "phase/optimizer_s": 0.05 * time}


def test_steps_that_wait_for_cores_which_others_took_are_a_remark_after_a_minute() -> None:
    assert crowded(busy_after=100.0, own_after=50.0, steps_after=200, times=2.0, phases_of=compute) == []
    [(_, found)] = crowded(busy_after=100.0, own_after=50.0, steps_after=400, times=2.0, phases_of=compute)
    assert (found.severity, found.cause) == ("info", "other programs")
    assert "other programs use many of them" in found.message


def test_a_jump_before_the_load_of_the_cores_was_read_is_not_judged() -> None:
    """The whole run takes two seconds, on a machine that others use: nobody can tell whose the slower steps are."""
    short = {"steps_before": 200, "step_s": 0.003, "steps_after": 300, "times": 2.0}
    assert crowded(busy_after=100.0, own_after=50.0, phases_of=compute, **short) == []


def test_a_neighbour_on_the_other_thread_of_the_same_core_is_not_the_run() -> None:
    assert crowded(busy_after=97.0, own_after=97.0, steps_after=300, times=1.15, phases_of=compute) == []


def test_a_run_that_is_slower_while_the_machine_is_not_busier_is_found_at_once() -> None:
    [(step, found)] = crowded(busy_after=70.0, own_after=99.0, steps_after=200, times=1.3, phases_of=compute)
    assert (found.severity, found.cause) == ("warning", "")
    assert step < 325


def test_one_phase_that_grows_alone_is_the_run_s_own_however_busy_the_machine_is() -> None:
    def forward(_step: int, time: float) -> dict[str, float]:
        return {"phase/forward_s": time - 0.06, "phase/backward_s": 0.05, "phase/optimizer_s": 0.01}

    [(step, found)] = crowded(busy_after=100.0, own_after=60.0, steps_after=100, times=1.5, phases_of=forward)
    assert (found.severity, found.evidence["phase"]) == ("warning", "forward")
    assert step < 320


def test_a_phase_that_jumps_alone_is_seen_through_the_noise_of_the_whole_step() -> None:
    """As on a crowded machine, whose load comes and goes: all phases wander, and one of them doubles."""
    draw = random.Random(5)

    def steps(first: int, count: int, forward: float) -> list[dict[str, float]]:
        loads = [1 + 0.25 * math.sin(step / 25) + draw.gauss(0, 0.05) for step in range(first, first + count)]
        return [{"phase/forward_s": forward * load, "phase/backward_s": 0.13 * load} for load in loads]

    took = [*steps(1, 300, 0.07), *steps(301, 150, 0.14)]
    changes, _ = train([sum(one.values()) for one in took], extra=lambda step, _: took[step - 1])
    [change] = fired(changes)
    assert 320 <= change.step <= 350
    assert 295 <= (change.finding.since_step or 0) <= 305
    assert change.finding.evidence["phase"] == "forward"
    quiet = steps(1, 1000, 0.07)
    assert train([sum(one.values()) for one in quiet], extra=lambda step, _: quiet[step - 1])[0] == []


# ---- recorded runs


def test_recorded_healthy_runs_are_silent() -> None:
    """A part of them; benchmarks/detection judges all."""
    for record in [*records.curves()[9::7], *records.mlperf()]:
        assert replay(record.moments, Plan((RULE,))).alerts == [], record.name


def test_the_functions_that_measure_recall_do() -> None:
    found, total, latencies = throughput.drops(5.7, seed=1, draws=12)
    assert total == 12
    assert found >= 11
    assert max(latencies) <= 20
    alerts, steps = throughput.healthy(jobs=2, steps=1500)
    assert (alerts, steps) == (0, 3000)


# ---- a slow rise


def rising(steps: int = 400, *, per_step: float = 0.02, seed: int = 3) -> list[float]:
    """Each step takes 2 % of the first one longer than the step before."""
    return [level * (1 + per_step * step) for step, level in enumerate(noisy(0.05, steps, seed=seed))]


def in_phase(name: str) -> Extra:
    return lambda _, time: {f"phase/{name}_s": time - 0.02, "phase/backward_s": 0.02}


@pytest.mark.parametrize(("phase", "severity"), [("data", "warning"), ("forward", "warning"), ("other", "info")])
def test_steps_that_get_ever_longer_are_found_where_none_of_them_jumps(phase: str, severity: str) -> None:
    changes, _ = train(rising(), extra=in_phase(phase))
    found = fired(changes)[0].finding
    assert found.severity == severity
    assert "each time the run was twice as long they had become longer" in found.message
    assert found.evidence["phase"] == phase
    assert found.gain_pct is not None and found.gain_pct > 30


def test_a_rise_within_a_few_seconds_is_no_drift() -> None:
    """400 steps of some milliseconds, as of an example: a busy machine alone makes such a rise."""
    times = [time / 50 for time in rising()]
    assert sum(times) < 4.0
    assert fired(train(times, extra=lambda _, time: {"phase/data_s": time})[0]) == []
    longer = [time / 50 for time in rising(8000)]
    assert fired(train(longer, extra=lambda _, time: {"phase/data_s": time})[0]), "a longer one is found"


def test_steps_that_get_longer_with_the_sequence_are_silent() -> None:
    more = lambda _, time: {**phases(0, time), "tokens_per_s": 5000.0}  # noqa: E731
    assert fired(train(rising(), extra=more)[0]) == []


@pytest.mark.parametrize("seed", range(20))
def test_a_noisy_run_of_any_length_does_not_drift(seed: int) -> None:
    draw = random.Random(seed)
    times, level = [], 0.1
    for _ in range(1500):
        level *= math.exp(draw.gauss(0, 0.01))  # a machine whose load wanders
        times.append(level * math.exp(abs(draw.gauss(0, 0.1))))
    messages = [change.finding.message for change in fired(train(times, extra=phases)[0])]
    assert not any("twice as long" in message for message in messages)
