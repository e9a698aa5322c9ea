"""Phases timed by events on the device, beside the profiler's spans of the same kernels; step time beside the clock."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from report import Result, compared
from stage import Stage
from training import SIZES, Training, recorded

PHASES = ("forward", "backward", "optimizer")
WARM_UP, WARM_UP_S, TIMED, PROFILED = 60, 5.0, 100, 12


def check(stage: Stage) -> list[Result]:
    import perfagent

    training = Training(SIZES[stage.size("real")], stage.device)
    folder = stage.recording("timing")
    run = perfagent.attach(training.model, training.optimizer, record=str(folder), project="gpu-check")
    training.warm_up(stage.steps(WARM_UP), stage.seconds(WARM_UP_S))
    warm, timed, profiled = training.done, stage.steps(TIMED), stage.steps(PROFILED)
    began = time.perf_counter()
    for _ in range(timed):
        training.step()
    training.wait()
    wall_s = time.perf_counter() - began
    spans = _profiled(training, stage, profiled)
    run.finish()
    recording = recorded(folder)
    results = []
    steps = (warm + 2, warm + timed)  # the first of them began before the clock
    own = recording.values("step_time_s", steps=steps)
    clock = "clock round the steps"
    results.append(
        compared("step time", _mean(own) * 1e3, wall_s / timed * 1e3, unit="ms", share=0.02, within=0.05, source=clock)
    )
    steps = (warm + timed + 2, warm + timed + profiled)
    for phase in PHASES:
        found = recording.values(f"phase/{phase}_s", steps=steps)
        results.append(
            compared(
                f"{phase} by events",
                _mean(found) * 1e3,
                spans[phase] * 1e3,
                unit="ms",
                share=0.05,
                within=0.2,
                source="profiler",
            )
        )
    return results


def _profiled(training: Training, stage: Stage, steps: int) -> dict[str, float]:
    """Seconds of each phase by the profiler: on a GPU from its first kernel to the end of its last. A mean without the first."""
    profiler: Any = training.torch.profiler
    kinds = [profiler.ProfilerActivity.CPU] + ([] if stage.dry else [profiler.ProfilerActivity.CUDA])
    with profiler.profile(activities=kinds) as profile:
        for _ in range(steps):
            training.step(annotated=True)
        training.wait()
    path = stage.out / "trace.json"
    profile.export_chrome_trace(str(path))
    events = json.loads(Path(path).read_text("utf-8"))["traceEvents"]
    path.unlink()
    category = "user_annotation" if stage.dry else "gpu_user_annotation"
    spent: Counter[str] = Counter()
    for phase in PHASES:
        mine = [event for event in events if event.get("cat") == category and event.get("name") == f"check {phase}"]
        mine.sort(key=lambda event: float(event["ts"]))
        if len(mine) != steps:
            raise RuntimeError(f"the profiler's trace has {len(mine)} spans of {phase}, not {steps}")
        spent[phase] = sum(float(event["dur"]) for event in mine[1:])
    return {phase: total / 1e6 / (steps - 1) for phase, total in spent.items()}


def _mean(values: list[float]) -> float:
    if not values:
        raise RuntimeError("nothing was recorded for these steps")
    return sum(values) / len(values)
