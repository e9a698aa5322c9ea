"""What bounds a run in which nothing is wrong, and compute_bound, which says it as a finding."""

from __future__ import annotations

from typing import Any

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.bounds import Bound, what_bounds
from perfagent_server.rules.speed.compute_bound import ComputeBound
from perfagent_server.rules.speed.data_bound import DataBound

COMPUTE = {"data": 0.002, "forward": 0.03, "backward": 0.06, "optimizer": 0.005, "other": 0.003}


def job(phases: dict[str, float], steps: int = 60, **readings: float | None) -> TimedJob:
    made = TimedJob(ComputeBound(), DataBound())
    for _ in range(steps // 10):
        made.train(10, phases)
        made.read(**{name: value for name, value in readings.items() if value is not None})
    return made


def bound_of(made: TimedJob) -> Bound:
    bound = what_bounds(made.evaluator.window)
    assert bound is not None
    return bound


@pytest.mark.parametrize(
    ("phases", "kind", "share", "advice"),
    [
        (COMPUTE, "compute", 95, "torch.compile"),
        (COMPUTE | {"data": 0.2}, "data", 67, "DataLoader"),
        (COMPUTE | {"comm": 0.2}, "communication", 67, "no_sync"),
        (COMPUTE | {"h2d": 0.2}, "copies", 67, "pin_memory"),
        (COMPUTE | {"rollout": 0.2}, "rollout", 67, "vectorized"),
        (COMPUTE | {"tokenize": 0.2}, "own code", 67, "this phase"),
        (COMPUTE | {"other": 0.2}, "unmeasured", 67, "run.phase"),
        (COMPUTE | {"data": 0.094}, "compute", 49, "torch.compile"),
        (COMPUTE | {"data": 0.096}, "data", 49, "DataLoader"),
    ],
)
def test_the_largest_part_of_a_steady_step_bounds_it(
    phases: dict[str, float], kind: str, share: float, advice: str
) -> None:
    bound = bound_of(job(phases))
    assert (bound.kind, round(bound.share_pct), bound.phase) == (kind, share, "tokenize" if kind == "own code" else "")
    assert sum(bound.shares_pct.values()) == pytest.approx(100.0)
    assert bound.step_p50_s == pytest.approx(sum(phases.values()))
    assert advice in bound.said().fix


def test_evaluations_saves_and_first_steps_are_no_part_of_it() -> None:
    made = job({"forward": 3.0}, 10)
    for _ in range(10):
        made.train(9, COMPUTE)
        made.train(1, COMPUTE | {"eval": 9.0, "checkpoint": 3.0})
    bound = bound_of(made)
    assert (bound.kind, bound.steps) == ("compute", 48)
    assert (bound.step_p50_s, bound.step_p90_s) == (pytest.approx(0.1), pytest.approx(0.1))


@pytest.mark.parametrize(
    ("busy", "sm", "tensor", "dram", "mfu", "kind", "advice"),
    [
        (98, 93, 12, 60, None, "memory bandwidth", "fuses elementwise"),
        (98, 93, 12, 59, None, "compute", "bf16"),
        (99, 95, 65, 64, 0.40, "compute", "good trainings"),
        (99, 80, 8, 30, 0.39, "compute", "bf16"),
        (95, 39, None, None, None, "launches", "CUDA graphs"),
        (95, 40, None, None, None, "compute", "bf16"),
        (69, None, None, None, None, "launches", "CUDA graphs"),
        (70, None, None, None, None, "compute", "bf16"),
    ],
)
def test_on_a_gpu_the_roofline_says_what_holds_compute_back(
    busy: float, sm: float, tensor: float, dram: float, mfu: float, kind: str, advice: str
) -> None:
    """Made-up series: not yet seen on a card."""
    readings = {"utilization_pct": busy, "sm_active_pct": sm, "tensor_active_pct": tensor, "dram_active_pct": dram}
    made = job(COMPUTE, mfu=mfu, **{f"gpu__{name}": value for name, value in readings.items()})
    bound = bound_of(made)
    assert (bound.kind, bound.roofline.memory_pct, bound.roofline.mfu) == (kind, dram, mfu)
    assert advice in bound.said().fix
    made.restart_server()
    assert bound_of(made) == bound


@pytest.mark.parametrize(("busy", "kind", "share"), [(90.0, "compute", 99), (89.0, "unmeasured", 67)])
def test_a_host_that_runs_ahead_of_a_busy_gpu_loses_nothing(busy: float, kind: str, share: float) -> None:
    bound = bound_of(job(COMPUTE | {"other": 0.2}, gpu__utilization_pct=busy))
    assert (bound.kind, round(bound.share_pct)) == (kind, share)


@pytest.mark.parametrize(
    ("phases", "steps", "told"),
    [
        (COMPUTE, 2900, []),
        (COMPUTE, 4000, [("compute_bound", "info")]),
        (COMPUTE | {"other": 0.0085}, 4000, [("compute_bound", "info")]),
        (COMPUTE | {"other": 0.0087}, 4000, []),
        ({"data": 0.06, "forward": 0.1}, 4000, [("data_bound", "warning")]),
    ],
    ids=["a short run", "five minutes", "nine tenths", "less", "beside another alert"],
)
def test_five_minutes_of_nothing_but_compute_are_a_remark(
    phases: dict[str, float], steps: int, told: list[tuple[str, str]]
) -> None:
    made = job(phases, steps)
    found: list[Any] = [*made.found("compute_bound"), *made.found("data_bound")]
    assert [(one.rule, one.severity) for one in found] == told
    assert made.evaluator.verdict().rule == ("data_bound" if "data_bound" in str(told) else "healthy")
