"""The agent never makes the host wait for the device, and what is computed stays the same to the last bit.

Two instruments, because each misses something: torch's debug mode raises at what torch knows to synchronize; the
profiler counts the calls of the CUDA runtime that wait, whoever makes them.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any

from report import Result, not_checked
from stage import Stage
from training import SIZES, Child, Recording, Training, recorded

WAITING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuStreamSynchronize",
)
LAUNCHES = "LaunchKernel"
"""In the names of the calls that launch, of the runtime and of the driver."""
WARM_UP, STEPS, PROFILED = 40, 300, 20


def check(stage: Stage) -> list[Result]:
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return [*_without_waiting(stage), _same_losses(stage)]


def _without_waiting(stage: Stage) -> list[Result]:
    import perfagent
    from perfagent.boundary import guard

    training = Training(SIZES[stage.size("small")], stage.device)
    cuda: Any = training.torch.cuda
    for _ in range(stage.steps(WARM_UP)):
        training.step()
    alone = _waits(training, stage)
    told = _Told()
    logging.getLogger("perfagent").addHandler(told)
    folder = stage.recording("synchronization")
    run = perfagent.attach(training.model, training.optimizer, record=str(folder), project="gpu-check")
    for _ in range(stage.steps(WARM_UP)):
        training.step()
    attached = _waits(training, stage)
    names = ["waits in torch's debug mode", "... and the mode sees one that is there", "waits counted by the profiler"]
    if stage.dry:
        _look_at_every_step(training, run, stage.steps(STEPS))
        run.finish()
        rest = [_recorded(recorded(folder), stage.steps(STEPS)), _hooks(guard.failures, told.lines)]
        return [*(not_checked(name, "no GPU") for name in names), *rest]
    failed = ""
    cuda.set_sync_debug_mode("error")
    try:
        _look_at_every_step(training, run, STEPS)
    except RuntimeError as error:
        failed = str(error).splitlines()[0]
    seen = False
    try:
        training.step().item()
    except RuntimeError:
        seen = True
    finally:
        cuda.set_sync_debug_mode("default")
    training.wait()
    run.finish()
    more = {name: attached[name] - alone[name] for name in WAITING if attached[name] != alone[name]}
    waits = sum(attached[name] for name in WAITING), sum(alone[name] for name in WAITING)
    counted = Result(
        names[2],
        f"as many in {PROFILED} steps as without the agent: {waits[1]}",
        f"{waits[0]}" + (f" ({more})" if more else ""),
        "pass" if waits[0] <= waits[1] else "FAIL",
    )
    if not (alone[LAUNCHES] and attached[LAUNCHES]):
        counted = not_checked(names[2], "the profiler tells of no call of the CUDA runtime here")
    return [
        Result(names[0], f"0 in {STEPS} steps", failed or f"0 in {STEPS} steps", "FAIL" if failed else "pass"),
        Result(names[1], "raises at loss.item()", "raises" if seen else "does not", "pass" if seen else "FAIL"),
        counted,
        _recorded(recorded(folder), STEPS),
        _hooks(guard.failures, told.lines),
    ]


def _hooks(failures: dict[str, int], lines: list[str]) -> Result:
    """A hook that raises, in debug mode at a wait of its own, is swallowed by the guard and turned off: that must not
    pass."""
    measured = ", ".join(failures) or "; ".join(lines) or "none"
    return Result("hooks turned off, warnings of the agent", "none", measured, "FAIL" if failures or lines else "pass")


def _look_at_every_step(training: Training, run: Any, steps: int) -> None:
    """The gradients of every step, and the weights before and after every 16th: otherwise few would be, within the
    budget. Weights are logged as a picture and a histogram now and then."""
    import perfagent

    weights = next(training.model.parameters()).detach().reshape(-1)[:4096]
    for step in range(steps):
        run._progress.measure_at = 0
        training.step()
        if step % 16 == 0:
            run.log({"picture": perfagent.Image(weights.reshape(-1, 8)), "weights": perfagent.Histogram(weights)})


def _recorded(recording: Recording, steps: int) -> Result:
    """An agent that does nothing waits for nothing, either."""
    found = [len(recording.values(name)) for name in ("loss", "grad/norm", "update/ratio")]
    return Result(
        "... losses, norms of gradients and moves of weights that were recorded meanwhile",
        f"at least {steps}, {steps}, {steps // 16}",
        ", ".join(map(str, found)),
        "pass" if found[0] >= steps and found[1] >= steps and found[2] >= steps // 16 else "FAIL",
    )


def _waits(training: Training, stage: Stage) -> Counter[str]:
    """Calls of the CUDA runtime that wait, in some steps, and (LAUNCHES) those that launch kernels."""
    profiler: Any = training.torch.profiler
    kinds = [profiler.ProfilerActivity.CPU] + ([] if stage.dry else [profiler.ProfilerActivity.CUDA])
    training.wait()
    with profiler.profile(activities=kinds, acc_events=True) as profile:
        for _ in range(stage.steps(PROFILED)):
            training.step()
    names = [event.name for event in profile.events()]
    return Counter(LAUNCHES if LAUNCHES in name else name for name in names if name in WAITING or LAUNCHES in name)


def _same_losses(stage: Stage) -> Result:
    name = "losses of 60 steps with and without the agent"
    found = []
    for record in (None, stage.recording("equality")):
        child = Child(stage.size("small"), stage.device, record=record, deterministic=True)
        found.append(child.ask(f"block {stage.steps(60)}")["losses"])
        child.end()
    if found[0] == found[1]:
        return Result(name, "equal to the last bit", "equal", "pass")
    return Result(name, "equal to the last bit", f"differ from step {_first(found)} on", "FAIL")


def _first(found: list[list[str]]) -> int:
    return next(step for step, (one, other) in enumerate(zip(*found, strict=True), 1) if one != other)


class _Told(logging.Handler):
    """What the agent warned of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
