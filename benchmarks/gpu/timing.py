"""Phases timed by events on the device, beside the profiler's spans of the same kernels; step time beside the clock."""

from __future__ import annotations

import json
import time
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
    """Seconds of each phase by the profiler. A mean without the first."""
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
    found = {}
    for phase in PHASES:
        spans = host_spans(events, phase) if stage.dry else device_spans(events, phase)
        if len(spans) != steps:
            raise RuntimeError(f"the profiler's trace has {len(spans)} spans of {phase}, not {steps}")
        found[phase] = _mean([end - begin for begin, end in spans[1:]]) / 1e6
    return found


def host_spans(events: list[dict[str, Any]], phase: str) -> list[tuple[float, float]]:
    """(begin, end) of what the training called by that name, in microseconds."""
    mine = [
        event for event in events if event.get("cat") == "user_annotation" and event.get("name") == f"check {phase}"
    ]
    return sorted((float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in mine)


def device_spans(events: list[dict[str, Any]], phase: str) -> list[tuple[float, float]]:
    """From the first kernel that was launched meanwhile to the end of the last. The profiler's own
    `gpu_user_annotation` knows only what the annotating thread launched, and backward launches from a thread of its own
    (pytorch/kineto issue 1132)."""
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    work = sorted(
        (launched[event["args"]["correlation"]], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and event["args"].get("correlation") in launched
    )
    spans = []
    for begin, end in host_spans(events, phase):
        mine = [(first, last) for at, first, last in work if begin <= at <= end]
        if mine:
            spans.append((min(first for first, _ in mine), max(last for _, last in mine)))
    return spans


def _mean(values: list[float]) -> float:
    if not values:
        raise RuntimeError("nothing was recorded for these steps")
    return sum(values) / len(values)
