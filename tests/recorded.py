"""Runs as an agent would send them, for pages to show."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from builders import ServerProcess, web

from perfagent.wire import Event, Frame, Group, encode

CPU_NAMES = (
    "loss", "grad/norm", "tokens_per_s", "samples_per_s", "step_time_s", "phase/data_s", "phase/forward_s", "phase/backward_s",
    "phase/optimizer_s", "phase/other_s", "lr", "host/cpu_pct", "host/memory_used_bytes", "process/cpu_pct", "process/rss_bytes",
    "agent/overhead_pct",
)  # fmt: skip

Column = npt.NDArray[np.float64]


def training(steps: npt.NDArray[np.int64], *, seed: int = 1) -> dict[str, Column]:
    """Values of a small training job on a CPU, one a step and name."""
    rng = np.random.default_rng(seed)
    x = steps.astype(np.float64)

    def noisy(base: float | Column, share: float = 0.03) -> Column:
        return np.asarray(base * (1 + share * rng.standard_normal(len(x))))

    end = max(float(x[-1]), 1.0)
    forward, backward, optimizer, other, data = noisy(0.031), noisy(0.062), noisy(0.008), noisy(0.001), noisy(0.004)
    step_time = forward + backward + optimizer + other + data
    return {
        "loss": noisy(4.2 * np.exp(-3 * x / end) + 1.3),
        "grad/norm": noisy(1 + 0.3 * np.sin(x / 40), 0.1),
        "tokens_per_s": 4096 / step_time,
        "samples_per_s": 16 / step_time,
        "step_time_s": step_time,
        "phase/data_s": data,
        "phase/forward_s": forward,
        "phase/backward_s": backward,
        "phase/optimizer_s": optimizer,
        "phase/other_s": other,
        "lr": 3e-4 * np.minimum(x / (0.02 * end), 1) * np.cos(1.4 * x / end),
        "host/cpu_pct": np.clip(noisy(64, 0.08), 0, 100),
        "host/memory_used_bytes": 2.0**30 * (9 + x / end),
        "process/cpu_pct": noisy(190, 0.05),
        "process/rss_bytes": 2.0**30 * (1.2 + 0.1 * x / end),
        "agent/overhead_pct": noisy(0.3, 0.1),
    }


def send(
    server: ServerProcess,
    run: str,
    values: Mapping[str, Sequence[float] | Column],
    steps: npt.NDArray[np.int64],
    *,
    seq: int = 1,
    rank: int = 0,
    project: str = "tests",
    name: str | None = None,
    events: Sequence[Event] = (),
    seconds_a_step: float = 0.1,
) -> None:
    """One frame through the public door; the last step is now. Its sender sends no heartbeat unless its state says so."""
    now = time.time()
    if not any(event.kind == "state" for event in events):
        events = [Event(kind="state", time=now, data={"state": "running", "heartbeat": False}), *events]
    clock = now - (steps[-1] - steps) * seconds_a_step
    group = Group(steps.astype("<i8"), clock, clock - clock[0], dict(values))  # type: ignore[arg-type]
    frame = Frame(
        project=project,
        run=run,
        name=name or run,
        source=f"{run}-{rank}",
        attempt=1,
        rank=rank,
        seq=seq,
        groups=[group],
        events=list(events),
    )
    headers = {"Content-Type": "application/x-msgpack"}
    answer = web().post(f"{server.url}/api/v1/ingest", content=encode(frame), headers=headers, timeout=60)
    answer.raise_for_status()
    reply = answer.json()
    assert reply["stored"] > 0, reply
    assert not reply["rejected"], reply


def record_run(server: ServerProcess, run: str, *, steps: int = 400, **more: object) -> None:
    """A run of 16 series."""
    x = np.arange(1, steps + 1)
    send(server, run, training(x), x, **more)  # type: ignore[arg-type]


def log(server: ServerProcess, run: str, step: int, project: str = "tests", **metrics: float) -> None:
    """One row through POST /api/v1/log, as a script without the agent would."""
    spelled = {name.replace("__", "/"): value if math.isfinite(value) else "NaN" for name, value in metrics.items()}
    body = {"project": project, "run": run, "step": step, "metrics": spelled}
    web().post(f"{server.url}/api/v1/log", json=body).raise_for_status()
