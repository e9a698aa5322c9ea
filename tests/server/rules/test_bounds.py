"""What bounds a run in which nothing is wrong, and compute_bound, which says it as a finding."""

from __future__ import annotations

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.bounds import what_bounds
from perfagent_server.rules.speed.compute_bound import ComputeBound
from perfagent_server.rules.speed.data_bound import DataBound

COMPUTE = {"data": 0.002, "forward": 0.03, "backward": 0.06, "optimizer": 0.005, "other": 0.003}


def job(phases: dict[str, float], steps: int = 60, **readings: float) -> TimedJob:
    made = TimedJob(ComputeBound(), DataBound())
    for _ in range(steps // 10):
        made.train(10, phases)
        if readings:
            made.read(**readings)
    return made


@pytest.mark.parametrize(
    ("phases", "kind", "share", "words", "advice"),
    [
        (COMPUTE, "compute", 95, "Compute bounds it: forward, backward and optimizer take 95 % of a step", "torch.compile"),
        (COMPUTE | {"data": 0.2}, "data", 67, "waiting for batches takes 67 %", "DataLoader"),
        (COMPUTE | {"comm": 0.2}, "communication", 67, "what nothing overlaps takes 67 %", "no_sync"),
        (COMPUTE | {"h2d": 0.2}, "copies", 67, "Copies to the device bound it: they take 67 %", "pin_memory"),
        (COMPUTE | {"rollout": 0.2}, "rollout", 67, "Rollouts", "vectorized"),
        (COMPUTE | {"tokenize": 0.2}, "own code", 67, "tokenize takes 67 %", "that phase"),
        (COMPUTE | {"other": 0.2}, "unmeasured", 67, "does not measure", "run.phase"),
    ],
)  # fmt: skip
def test_the_largest_part_of_a_steady_step_bounds_it(
    phases: dict[str, float], kind: str, share: float, words: str, advice: str
) -> None:
    bound = what_bounds(job(phases).evaluator.window)
    assert bound is not None
    assert (bound.kind, round(bound.share_pct)) == (kind, share)
    assert sum(bound.shares_pct.values()) == pytest.approx(100.0)
    assert words in bound.message
    assert advice in bound.next_try
    assert bound.step_p50_s == pytest.approx(sum(phases.values()))
    assert bound.message.endswith(".") and bound.next_try.endswith(".")


def test_evaluations_saves_and_first_steps_are_no_part_of_it() -> None:
    made = job({"forward": 3.0}, 5 * 2)
    for _ in range(10):
        made.train(9, COMPUTE)
        made.train(1, COMPUTE | {"eval": 9.0, "checkpoint": 3.0})
    bound = what_bounds(made.evaluator.window)
    assert bound is not None
    assert bound.kind == "compute"
    assert (bound.step_p50_s, bound.step_p90_s) == (pytest.approx(0.1), pytest.approx(0.1))
    assert bound.steps == 48


def on_gpu(
    busy: float,
    *,
    sm: float | None = None,
    tensor: float | None = None,
    dram: float | None = None,
    mfu: float | None = None,
) -> TimedJob:
    readings = {
        "gpu__utilization_pct": busy, "gpu__sm_active_pct": sm, "gpu__tensor_active_pct": tensor,
        "gpu__dram_active_pct": dram, "mfu": mfu,
    }  # fmt: skip
    return job(COMPUTE, **{name: value for name, value in readings.items() if value is not None})


@pytest.mark.parametrize(
    ("made", "kind", "words", "advice"),
    [
        (
            on_gpu(98, sm=93, tensor=12, dram=81),
            "memory bandwidth",
            "81 % of its memory bandwidth",
            "fuses elementwise",
        ),
        (
            on_gpu(99, sm=95, tensor=65, dram=40, mfu=0.52),
            "compute",
            "52 % of its peak arithmetic (MFU)",
            "good trainings",
        ),
        (on_gpu(99, sm=80, tensor=8, dram=30, mfu=0.08), "compute", "8 % of its peak arithmetic", "bf16"),
        (on_gpu(95, sm=14), "launches", "multiprocessors 14 % of the time", "CUDA graphs"),
        (on_gpu(41), "launches", "launches kernels too slowly", "CUDA graphs"),
        (on_gpu(97), "compute", "Compute bounds it", "bf16"),
    ],
)
def test_on_a_gpu_the_roofline_says_what_holds_compute_back(made: TimedJob, kind: str, words: str, advice: str) -> None:
    """Made-up series: not yet seen on a card."""
    bound = what_bounds(made.evaluator.window)
    assert bound is not None
    assert bound.kind == kind
    assert words in bound.message
    assert advice in bound.next_try


def test_a_host_that_runs_ahead_of_a_busy_gpu_loses_nothing() -> None:
    bound = what_bounds(job(COMPUTE | {"other": 0.2}, gpu__utilization_pct=97.0).evaluator.window)
    assert bound is not None
    assert (bound.kind, round(bound.share_pct)) == ("compute", 99)


def test_of_too_few_steps_and_of_steps_without_phases_nothing_is_said() -> None:
    assert what_bounds(job(COMPUTE, 10).evaluator.window) is None
    assert what_bounds(job({}, 100).evaluator.window) is None
    assert what_bounds(TimedJob(ComputeBound()).evaluator.window) is None


def test_it_survives_a_restart_of_the_server() -> None:
    made = job(COMPUTE, gpu__utilization_pct=97.0, gpu__dram_active_pct=81.0)
    before = what_bounds(made.evaluator.window)
    made.restart_server()
    assert what_bounds(made.evaluator.window) == before


def test_five_minutes_of_nothing_but_compute_are_a_remark() -> None:
    made = job(COMPUTE, 2000)
    assert made.changes == [], "a short healthy run is silent"
    made.train(2000, COMPUTE)
    [found] = made.found("compute_bound")
    assert found.severity == "info"
    assert found.evidence["share_pct"] == pytest.approx(95.0)
    assert made.evaluator.verdict().rule == "healthy"


def test_compute_is_no_remark_while_another_alert_on_speed_is_open() -> None:
    slow = {"data": 0.011, "forward": 0.035, "backward": 0.062}
    made = job(slow, 6000)
    assert {change.finding.rule for change in made.changes} == {"data_bound"}


def test_where_something_else_takes_a_tenth_it_is_not_bound_by_compute() -> None:
    assert job(COMPUTE | {"other": 0.02}, 6000).changes == []
