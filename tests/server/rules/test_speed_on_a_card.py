"""h2d_bound and host_bound, on made-up series: not yet seen on a card."""

from __future__ import annotations

import pytest
from timed_job import TimedJob

from perfagent_server.rules.speed.h2d_bound import H2dBound
from perfagent_server.rules.speed.host_bound import HostBound

STEP = {"forward": 0.3, "backward": 0.59, "optimizer": 0.1, "other": 0.01}


@pytest.mark.parametrize(
    ("step", "copy_s", "fires"),
    [(STEP, 0.11, False), (STEP, 0.112, True), ({"forward": 0.002}, 0.00099, False), ({"forward": 0.002}, 0.00101, True)],
    ids=["less", "a tenth", "of a toy", "a millisecond"],
)  # fmt: skip
def test_copies_to_the_device_are_told_from_a_tenth_on(step: dict[str, float], copy_s: float, fires: bool) -> None:
    made = TimedJob(H2dBound())
    made.train(5000 if len(step) == 1 else 40, step | {"h2d": copy_s})
    made.restart_server()
    made.train(40, step | {"h2d": copy_s})
    assert [one.severity for one in made.found("h2d_bound")] == (["warning"] if fires else [])
    for one in made.found("h2d_bound"):
        assert one.gain_pct == pytest.approx(100 * copy_s / (sum(step.values()) + copy_s))


def test_copies_of_an_evaluation_and_the_first_ones_are_no_fault() -> None:
    made = TimedJob(H2dBound())
    made.train(5, STEP | {"h2d": 5.0})
    for _ in range(10):
        made.train(9, STEP | {"h2d": 0.01})
        made.train(1, STEP | {"h2d": 3.0, "eval": 20.0})
    assert made.changes == []


def on_gpu(phases: dict[str, float], seconds: int = 200, *, calls: float = 0.0, **readings: float) -> TimedJob:
    made = TimedJob(HostBound())
    for _ in range(seconds):
        made.train(1, phases)
        made.read(**readings)
        if made.step == 30:
            made.read(sync__calls_per_step=calls)
    return made


@pytest.mark.parametrize(
    ("busy", "sm", "severity"),
    [
        (29.0, None, "warning"), (30.0, None, "info"), (69.0, None, "info"), (70.0, None, None), (92.0, 24.0, "info"),
        (92.0, 25.0, None), (None, 12.0, "info"), (None, None, None),
    ],
)  # fmt: skip
def test_a_gpu_that_idles_within_the_model_waits_for_launches(
    busy: float | None, sm: float | None, severity: str | None
) -> None:
    readings = {"gpu__utilization_pct": busy, "gpu__sm_active_pct": sm}
    found = on_gpu(STEP, **{name: value for name, value in readings.items() if value is not None}).found("host_bound")
    assert [one.severity for one in found] == ([severity] if severity else [])
    for one in found:
        assert (one.evidence["utilization_pct"], one.evidence["sm_active_pct"]) == (busy, sm)


@pytest.mark.parametrize("phase", ["data", "comm", "other"])
@pytest.mark.parametrize(("share", "fires"), [(0.19, True), (0.205, False)])
def test_a_gpu_that_waits_a_fifth_of_the_step_is_not_host_bound(phase: str, share: float, fires: bool) -> None:
    work = (1 - share) / 2
    step = {"other": 0.0, "forward": work, "backward": work, phase: share}
    assert len(on_gpu(step, gpu__utilization_pct=40.0).found("host_bound")) == fires


def test_calls_that_wait_for_the_device_are_not_host_bound() -> None:
    assert on_gpu(STEP, 250, calls=12.0, gpu__utilization_pct=40.0).changes == []


def test_both_heal_and_survive_a_restart() -> None:
    made = on_gpu(STEP, gpu__utilization_pct=40.0)
    made.restart_server()
    for second in range(400):
        if second % 100 < 50:  # pauses between steps are no idle time
            made.train(1, STEP)
            made.read(gpu__utilization_pct=95.0)
        else:
            made.wait(1)
    copies = TimedJob(H2dBound())
    copies.train(60, STEP | {"h2d": 0.3})
    copies.train(200, STEP | {"h2d": 0.01})
    assert made.kinds == copies.kinds == ["fire", "resolve"]
