"""Checks trainings that behave differently on a GPU than on a CPU: the agent's recording is right, and the losses stay the same.

    python situations.py NAME DEVICE [FOLDER]     one training; recorded into FOLDER, or without the agent

Each training runs once with the agent and once without, in a fresh process. Both print their losses and the facts that the
recording must show, as JSON.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from report import Result, not_checked
from stage import Stage
from training import Recording, recorded

if TYPE_CHECKING:
    import torch

TOKENS = 2**40 + 1
"""A whole number that neither float32 nor bfloat16 can hold."""
STALL_S, STALLED_AT, NAN_AT, OVERFLOW_AT = 6.0, 20, 30, 25
STEPS = 60


def check(stage: Stage) -> list[Result]:
    return [result for situation in SITUATIONS.values() for result in _checked(stage, situation)]


def _checked(stage: Stage, situation: Callable[..., Any]) -> Iterator[Result]:
    name = situation.__name__
    title = (situation.__doc__ or name).strip().rstrip(".")
    if stage.dry and name in ONLY_ON_A_CARD:
        yield not_checked(title, "no GPU")
        return
    folder = stage.recording(f"situation-{name}")
    alone, watched = _trained(stage, name, None), _trained(stage, name, folder)
    same = alone["losses"] == watched["losses"]
    yield Result(f"{title}: losses", "equal to the last bit", "equal" if same else "differ", "pass" if same else "FAIL")
    for expected, measured, fits in SHOWS[name](recorded(folder), watched):
        yield Result(f"... {name}", expected, measured, "pass" if fits else "FAIL")


def _trained(stage: Stage, name: str, folder: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, name, stage.device, *([str(folder)] if folder else [])]
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=240, check=True, env=env)
    truth: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return truth


# ---- what a recording must show: (expected, measured, whether it fits)

Shown = Iterator[tuple[str, str, bool]]


def _steps(recording: Recording) -> list[int]:
    return sorted({step for step, _, _ in recording.series.get("step_time_s", [])})


def _all_steps(recording: Recording, truth: dict[str, Any]) -> tuple[str, str, bool]:
    """The first step has no time: nothing says when it began."""
    steps, expected = _steps(recording), truth["steps"]
    return f"steps 2 to {expected}", f"{len(steps)} steps", steps == list(range(2, expected + 1))


def _shows_whole_numbers(recording: Recording, truth: dict[str, Any]) -> Shown:
    found = recording.values("tokens")
    yield f"{TOKENS:,} in {truth['steps']} steps", f"{set(found)}", found == [float(TOKENS)] * truth["steps"]


def _shows_stall(recording: Recording, truth: dict[str, Any]) -> Shown:
    yield _all_steps(recording, truth)
    times = sorted(at for _, at, _ in recording.series.get("host/cpu_pct", []))
    longest = max((after - before for before, after in itertools.pairwise(times)), default=float("inf"))
    yield "figures of the host at least every 2.5 s", f"every {longest:.1f} s", longest <= 2.5


def _shows_steps(recording: Recording, truth: dict[str, Any]) -> Shown:
    yield _all_steps(recording, truth)


def _shows_scaler(recording: Recording, truth: dict[str, Any]) -> Shown:
    scales = recording.values("amp/scale")
    yield "a scale that was halved once", f"{sorted(set(scales))}", len(set(scales)) == 2
    skipped = recording.values("amp/skipped")  # counted from the start
    yield "1 step skipped", f"{max(skipped, default=0):.0f}", max(skipped, default=0) == 1


def _shows_nan(recording: Recording, truth: dict[str, Any]) -> Shown:
    found = [data for kind, _, data in recording.events if kind == "finding" and "nonfinite" in str(data.get("rule"))]
    evidence = found[0]["evidence"] if found else {}
    step = evidence.get("step")
    yield f"step {truth['nan_step']}", f"step {step}", step == truth["nan_step"]
    cause = evidence.get("cause"), (evidence.get("operator") or {}).get("operator"), evidence.get("module")
    yield (
        "the operator Log, or its module",
        ", ".join(map(str, cause)),
        cause[0] in ("operator", "module") and ("Log" in str(cause[1]) or cause[2] == "logs"),
    )


def _shows_one_rank(recording: Recording, truth: dict[str, Any]) -> Shown:
    yield _all_steps(recording, truth)
    waits = recording.values("phase/comm_s")
    yield "no more of a step than 20 % in collectives", f"{sum(waits):.3f} s", sum(waits) <= 0.2 * truth["seconds"]


# ---- the trainings


class Job:
    """A small perceptron, its batches, and the losses that it gives, which nothing reads before the end."""

    def __init__(self, device: str, folder: str | None, *, width: int = 256, learning_rate: float = 1e-3) -> None:
        import torch

        torch.manual_seed(0)
        torch.use_deterministic_algorithms(True)
        self.torch, self.device, self.folder, self.width = torch, device, folder, width
        layers = [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Linear(width, width), torch.nn.GELU()]
        self.model: torch.nn.Module = torch.nn.Sequential(*layers, torch.nn.Linear(width, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.losses: list[torch.Tensor] = []
        self.run: Any = None

    def attach(self) -> None:
        if self.folder is not None:
            import perfagent

            self.run = perfagent.attach(self.model, self.optimizer, record=self.folder, project="gpu-check")

    def batch(self) -> torch.Tensor:
        return self.torch.randn(64, self.width, device=self.device)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().mean()

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.detach())

    def end(self, **truth: Any) -> None:
        """Finishes the run, and says what was true."""
        losses = [loss.item().hex() for loss in self.losses]
        if self.run is not None:
            self.run.finish()
        sys.stdout.write(json.dumps({"losses": losses, "steps": len(losses), **truth}) + "\n")


def whole_numbers(job: Job) -> None:
    """Whole numbers that are logged from the device."""
    job.attach()
    tokens = job.torch.tensor(TOKENS, device=job.device)
    for _ in range(STEPS):
        job.step(job.loss(job.batch()))
        if job.run is not None:
            job.run.log({"tokens": tokens})
    job.end()


def stall(job: Job) -> None:
    """The device stands still for some seconds, while the host waits for nothing."""
    job.attach()
    for step in range(STEPS):
        if step == STALLED_AT:
            for _ in range(int(STALL_S / 0.5)):
                job.torch.cuda._sleep(int(0.5 * 1.8e9))  # cycles
        job.step(job.loss(job.batch()))
    time.sleep(STALL_S + 1.0)
    job.end()


def reduce_overhead(job: Job) -> None:
    """torch.compile(mode="reduce-overhead"), which replays CUDA graphs of its own."""
    job.model.compile(mode="reduce-overhead")
    job.attach()
    for _ in range(STEPS):
        job.torch.compiler.cudagraph_mark_step_begin()
        loss = job.loss(job.batch())
        job.step(loss)
        job.losses[-1] = job.losses[-1].clone()  # the graph writes the next step's loss to the same memory
    job.end()


def captured_step(job: Job) -> None:
    """A whole step captured in a CUDA graph, after a warm-up on a stream of its own."""
    torch = job.torch
    job.attach()
    static = job.batch()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            static.copy_(job.batch())
            job.step(job.loss(static))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = job.loss(static)
        loss.backward()
        job.optimizer.step()
    for _ in range(STEPS):
        static.copy_(job.batch())
        graph.replay()
        job.losses.append(loss.detach().clone())
    job.end()


def scaler(job: Job) -> None:
    """Half precision with a GradScaler, and one gradient that overflows."""
    job.attach()
    grad_scaler = job.torch.amp.GradScaler(job.device, init_scale=2.0**10)
    for step in range(STEPS):
        with job.torch.autocast(job.device, job.torch.float16 if job.device == "cuda" else job.torch.bfloat16):
            loss = job.loss(job.batch()).float()
        grad_scaler.scale(loss * (1e38 if step == OVERFLOW_AT else 1.0)).backward()
        grad_scaler.step(job.optimizer)
        grad_scaler.update()
        job.optimizer.zero_grad(set_to_none=True)
        job.losses.append(loss.detach())
    job.end()


def nan(job: Job) -> None:
    """The logarithm of a negative number in one step, while the host runs ahead of the device."""
    torch = job.torch

    class Logs(torch.nn.Module):  # type: ignore[name-defined,misc]
        shift = 1e3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x + self.shift)

    logs = Logs()
    job.model.add_module("logs", logs)
    job.attach()
    for step in range(1, STEPS + 1):
        logs.shift = -1e3 if step == NAN_AT else 1e3
        job.step(job.loss(job.batch()))
    job.end(nan_step=NAN_AT)


def one_rank(job: Job) -> None:
    """DDP with one rank, by NCCL on a card and by gloo on a CPU."""
    torch = job.torch
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29571", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    torch.distributed.init_process_group("nccl" if job.device == "cuda" else "gloo")
    job.model = torch.nn.parallel.DistributedDataParallel(job.model)
    job.attach()
    began = time.monotonic()
    for _ in range(STEPS):
        job.step(job.loss(job.batch()))
    seconds = time.monotonic() - began
    job.end(seconds=seconds)
    with contextlib.suppress(Exception):
        torch.distributed.destroy_process_group()


SITUATIONS = {
    one.__name__: one for one in (whole_numbers, stall, reduce_overhead, captured_step, scaler, nan, one_rank)
}
ONLY_ON_A_CARD = {"stall", "reduce_overhead", "captured_step"}
SHOWS: dict[str, Callable[[Recording, dict[str, Any]], Shown]] = {
    "whole_numbers": _shows_whole_numbers,
    "stall": _shows_stall,
    "reduce_overhead": _shows_steps,
    "captured_step": _shows_steps,
    "scaler": _shows_scaler,
    "nan": _shows_nan,
    "one_rank": _shows_one_rank,
}


if __name__ == "__main__":
    SITUATIONS[sys.argv[1]](Job(sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None))
