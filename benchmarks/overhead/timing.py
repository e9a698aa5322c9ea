"""What `attach` costs the training thread per step, with nothing logged: steps with and without the hooks, in turn.

Short blocks, in turn, and two figures of each: the difference of the medians (`..._us`) and of the lower deciles
(`..._low_us`, the quiet moments of a shared machine). Gradients are measured as often as the governor allows, as in
production. The loops:

- `hooks`: nothing but one scalar's forward, backward and an optimizer that does nothing, so that the hooks stand out.
- `loader`: the same with a DataLoader.
- `auto`: a step with the tensors of the MLP but small ones, as in a real loop: caches are colder and the noise is
  larger.
- `floor`: the `hooks` loop with nothing but a clock read at the same places (the optimizer's global hooks, round
  backward, the
  root module's forward hooks): what this machine charges for being called there at all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from workloads import make

import perfagent
from perfagent import patching
from perfagent.step.state import state


class NoOptimizer(torch.optim.Optimizer):
    """An optimizer whose step does nothing: torch wraps it with its hooks all the same."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None: ...


class Scalar(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.weight * value


def empty_step() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    model = Scalar()
    optimizer = NoOptimizer(model.parameters())
    value = torch.ones(())

    def step() -> None:
        model(value).backward()
        optimizer.step()

    return model, optimizer, step


def small_step() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    workload = make("tiny")
    return workload.model, workload.optimizer, workload.step


def loader_step() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    model = Scalar()
    optimizer = NoOptimizer(model.parameters())
    values: list[torch.Tensor] = [torch.ones(())] * 1_000_000
    batches = iter(DataLoader(values, batch_size=None))  # type: ignore[arg-type]

    def step() -> None:
        model(next(batches)).backward()
        optimizer.step()

    return model, optimizer, step


BLOCK = 20


def block_us(step: Callable[[], object]) -> float:
    """CPU of the training thread for one step, microseconds."""
    for _ in range(4):  # the caches, after the hooks were put in or taken out
        step()
    begin = time.thread_time()
    for _ in range(BLOCK):
        step()
    return (time.thread_time() - begin) / BLOCK * 1e6


def added_us(
    made: tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]], blocks: int
) -> tuple[float, float]:
    """Difference of the medians, and of the lower deciles, of blocks with the hooks in torch and without them."""
    model, optimizer, step = made
    run = perfagent.attach(model, optimizer, project="bench")
    for _ in range(100):  # the first steps look for model and loader
        step()
    attached: list[float] = []
    bare: list[float] = []
    for number in range(blocks):
        for hooked in (True, False) if number % 2 else (False, True):
            if hooked:
                patching.install()
                run._trained.watch()
                state.current = run._progress
                attached.append(block_us(step))
            else:
                state.current = None
                patching.remove()
                run._trained.take_off()
                bare.append(block_us(step))
    run.finish()
    median = statistics.median(attached) - statistics.median(bare)
    return median, sorted(attached)[blocks // 10] - sorted(bare)[blocks // 10]


def stamped() -> Callable[[torch.nn.Module], Callable[[], None]]:
    """Puts bare clock reads where the hooks are; what it returns takes them out again."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    stamps: deque[int] = deque(maxlen=1000)

    def stamp(*_: Any) -> None:
        stamps.append(time.perf_counter_ns())

    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        stamps.append(time.perf_counter_ns())
        result = original(*args, **kwargs)
        stamps.append(time.perf_counter_ns())
        return result

    def install(model: torch.nn.Module) -> Callable[[], None]:
        handles = [
            register_optimizer_step_pre_hook(stamp),
            register_optimizer_step_post_hook(stamp),
            model.register_forward_pre_hook(stamp),
            model.register_forward_hook(stamp),
        ]
        torch.autograd.backward = backward

        def remove() -> None:
            torch.autograd.backward = original
            for handle in handles:
                handle.remove()

        return remove

    return install


def floor_us(
    made: tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]], blocks: int
) -> tuple[float, float]:
    """The same two differences for bare clock reads."""
    model, _, step = made
    install = stamped()
    with_stamps: list[float] = []
    bare: list[float] = []
    for number in range(blocks):
        for hooked in (True, False) if number % 2 else (False, True):
            if hooked:
                remove = install(model)
                with_stamps.append(block_us(step))
                remove()
            else:
                bare.append(block_us(step))
    median = statistics.median(with_stamps) - statistics.median(bare)
    return median, sorted(with_stamps)[blocks // 10] - sorted(bare)[blocks // 10]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="attached steps of each loop")
    options = parser.parse_args()
    blocks = max(10, options.steps // BLOCK)
    result: dict[str, float] = {}
    result["floor_us"], result["floor_low_us"] = floor_us(empty_step(), blocks)
    for name, made in (("hooks", empty_step()), ("loader", loader_step()), ("auto", small_step())):
        result[f"{name}_us"], result[f"{name}_low_us"] = added_us(made, blocks)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
