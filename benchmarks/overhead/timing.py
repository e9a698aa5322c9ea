"""What `attach` costs the training thread per step, with nothing logged: steps with and without it in turn, in one process.

Two figures, both the median over pairs of neighbouring blocks of the difference in the median CPU time of a step:

- `hooks_us`: a step of nothing but one scalar's forward, backward and an optimizer that does nothing, so that the hooks stand
  out; caches are hot.
- `auto_us`: a step with the tensors of the MLP but small ones, as in a real loop: caches are colder, gradients are measured
  now and then, and the noise is larger.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from workloads import make

import perfagent


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


def block_us(step: Callable[[], object], steps: int) -> float:
    """Median CPU of the training thread for one step, microseconds."""
    times = []
    for _ in range(steps):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
    return statistics.median(times) * 1e6


def paired_us(made: tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], object]], steps: int, pairs: int) -> float:
    """Median over pairs of (attached - not attached)."""
    model, optimizer, step = made
    block_us(step, steps)
    differences = []
    for _ in range(pairs):
        before = block_us(step, steps)
        run = perfagent.attach(model, optimizer, project="bench")
        block_us(step, max(50, steps // 4))  # the hooks settle: the first steps look for model and loader
        attached = block_us(step, steps)
        run.finish()
        after = block_us(step, steps)
        differences.append(attached - (before + after) / 2)
    return statistics.median(differences)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="attached steps, over all pairs")
    options = parser.parse_args()
    pairs = 5
    steps = options.steps // pairs
    result = {"hooks_us": paired_us(empty_step(), steps, pairs), "auto_us": paired_us(small_step(), steps, pairs)}
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
