"""h2d_bound and host_bound, on made-up series: not yet seen on a card."""

from __future__ import annotations

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.h2d_bound import H2dBound
from perfagent_server.rules.speed.host_bound import HostBound

STEP = {"forward": 0.3, "backward": 0.59, "optimizer": 0.1, "other": 0.01}


@pytest.mark.parametrize(("copy_s", "found"), [(0.05, False), (0.2, True)])
def test_copies_to_the_device_that_the_step_waits_for(copy_s: float, found: bool) -> None:
    made = TimedJob(H2dBound())
    made.train(40, STEP | {"h2d": copy_s})
    made.restart_server()
    made.train(40, STEP | {"h2d": copy_s})
    assert [one.severity for one in made.found("h2d_bound")] == (["warning"] if found else [])
    for one in made.found("h2d_bound"):
        assert "200 ms of 1.2 s (17 %)" in one.message
        assert one.gain_pct == pytest.approx(100 / 6)
        assert "pin_memory=True" in one.fix


def test_an_evaluation_s_copies_and_the_first_ones_are_no_fault() -> None:
    made = TimedJob(H2dBound())
    made.train(5, STEP | {"h2d": 5.0})
    for _ in range(10):
        made.train(9, STEP | {"h2d": 0.01})
        made.train(1, STEP | {"h2d": 3.0, "eval": 20.0})
    assert made.changes == []


def test_copies_of_a_toy_and_absent_ones_are_silent() -> None:
    made = TimedJob(H2dBound())
    made.train(500, {"forward": 0.002, "h2d": 0.0008})
    made.train(500, {"forward": 0.002})
    assert made.changes == []


def test_copies_that_became_hidden_heal() -> None:
    made = TimedJob(H2dBound())
    made.train(60, STEP | {"h2d": 0.3})
    made.train(200, STEP | {"h2d": 0.01})
    assert [change.kind for change in made.changes if change.kind != "update"] == ["fire", "resolve"]


def on_gpu(phases: dict[str, float], seconds: int = 200, *, calls: float | None = 0.0, **readings: float) -> TimedJob:
    made = TimedJob(HostBound())
    for _ in range(seconds):
        made.train(1, phases)
        if readings:
            made.read(**readings)
        if made.step == 30 and calls is not None:
            made.read(sync__calls_per_step=calls)
    return made


@pytest.mark.parametrize(
    ("readings", "severity"),
    [
        ({"gpu__utilization_pct": 22.0}, "warning"),
        ({"gpu__utilization_pct": 55.0}, "info"),
        ({"gpu__utilization_pct": 92.0, "gpu__sm_active_pct": 12.0}, "info"),
        ({"gpu__utilization_pct": 92.0, "gpu__sm_active_pct": 70.0}, None),
        ({"gpu__utilization_pct": 97.0}, None),
        ({}, None),
    ],
)
def test_a_gpu_that_idles_within_the_model_s_own_work_waits_for_launches(
    readings: dict[str, float], severity: str | None
) -> None:
    made = on_gpu(STEP, **readings)
    assert [one.severity for one in made.found("host_bound")] == ([severity] if severity else [])
    for one in made.found("host_bound"):
        assert "the host launches kernels more slowly than they run" in one.message
        assert "CUDA graphs" in one.fix


@pytest.mark.parametrize("phase", ["data", "comm", "other", "rollout", "h2d"])
def test_a_gpu_that_waits_for_something_else_is_not_told_as_that(phase: str) -> None:
    assert (
        on_gpu({"forward": 0.3, "backward": 0.3, "other": 0.01, phase: 0.39}, gpu__utilization_pct=40.0).changes == []
    )


def test_where_calls_wait_for_the_device_it_is_sync_bound_s_business() -> None:
    made = on_gpu(STEP, 20, calls=None)
    made.read(sync__calls_per_step=12.0)
    for _ in range(200):
        made.train(1, STEP)
        made.read(gpu__utilization_pct=40.0)
    assert made.changes == []


def test_pauses_between_steps_are_no_idle_time() -> None:
    made = TimedJob(HostBound())
    for second in range(400):
        if second % 100 < 50:
            made.train(1, STEP)
            made.read(gpu__utilization_pct=95.0)
        else:
            made.wait(1)
    assert made.changes == []


def test_it_heals_and_survives_a_restart() -> None:
    made = on_gpu(STEP, gpu__utilization_pct=40.0)
    made.restart_server()
    for _ in range(200):
        made.train(1, STEP)
        made.read(gpu__utilization_pct=95.0)
    assert [change.kind for change in made.changes if change.kind != "update"] == ["fire", "resolve"]
