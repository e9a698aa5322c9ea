"""Model FLOPs utilization: what the agent counted and divided, beside the textbook's count, a clock and the data
sheet."""

from __future__ import annotations

import statistics
import time
from typing import Any

from report import Result, compared, not_checked
from stage import Stage
from training import SIZES, Training, flops_of_step, recorded

WARM_UP, WARM_UP_S, TIMED = 80, 10.0, 120


def check(stage: Stage) -> list[Result]:
    import perfagent
    from perfagent.probes.flops.device_peaks import peak_flops

    size = SIZES[stage.size("real")]
    training = Training(size, stage.device)
    folder = stage.recording("utilization")
    run = perfagent.attach(training.model, training.optimizer, record=str(folder), project="gpu-check")
    training.warm_up(stage.steps(WARM_UP), WARM_UP_S)
    warm, timed = training.done, stage.steps(TIMED)
    began = time.perf_counter()
    for _ in range(timed):
        training.step()
    training.wait()
    step_s = (time.perf_counter() - began) / timed
    run.finish()
    recording = recorded(folder)
    steps = (warm + 2, warm + timed)
    counted = [
        rate * seconds
        for rate, seconds in zip(
            recording.values("flops_per_s", steps=steps), recording.values("step_time_s", steps=steps), strict=False
        )
    ]
    if not counted:
        return [Result("floating-point operations of a step", "a count", "none was recorded", "FAIL")]
    results = [
        compared(
            "floating-point operations of a step",
            statistics.median(counted) / 1e12,
            flops_of_step(size) / 1e12,
            unit="TFLOP",
            share=0.02,
            source="textbook",
        )
    ]
    if stage.dry:
        return [*results, not_checked("MFU", "no GPU")]
    cuda: Any = training.torch.cuda
    name = cuda.get_device_name()
    peak = peak_flops(name, "bfloat16")
    told = recording.values("mfu", steps=steps)
    if peak is None:
        absent = "absent" if not told else f"{statistics.mean(told):.3f}"
        return [
            *results,
            Result("MFU", f"absent: no data sheet of {name} is known", absent, "FAIL" if told else "pass"),
        ]
    if not told:
        return [*results, Result("MFU", "a share", "none was recorded", "FAIL")]
    reached = _matrix_product(training) / peak
    share = statistics.mean(told)
    return [
        *results,
        compared(
            "MFU",
            share,
            flops_of_step(size) / step_s / peak,
            unit="",
            share=0.02,
            source=f"peak {peak / 1e12:g} TFLOP/s",
        ),
        Result(
            "MFU is below what one large matrix product reaches",
            f"below {reached:.3f}",
            f"{share:.3f}",
            "pass" if share < reached < 1.02 else "FAIL",
        ),
    ]


def _matrix_product(training: Training) -> float:
    """FLOP/s of a bf16 product of two 8192 x 8192 matrices."""
    torch = training.torch
    side = 8192
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(20):
        a @ b
    end.record()
    torch.cuda.synchronize()
    return float(2 * side**3 * 20 / (begin.elapsed_time(end) / 1e3))
