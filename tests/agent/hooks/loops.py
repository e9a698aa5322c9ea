"""Small models, the loops that train them, and what is expected of their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

READINGS_S = 0.001
"""What reading the virtual clock adds to a phase."""


def small(*, seed: int | None = None) -> nn.Sequential:
    if seed is not None:
        torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def sgd(*modules: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD([parameter for module in modules for parameter in module.parameters()], lr=lr)


def step(optimizer: Any, *losses: torch.Tensor) -> None:
    """Backward of the losses together, the optimizer, and clearing."""
    sum(loss.mean() for loss in losses).backward()  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()


def train(model: nn.Module, optimizer: Any, steps: int = 1, *, after: Callable[[], Any] = lambda: None) -> list[float]:
    """Answers the losses. after: called after each step."""
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        after()
    return losses


def numbered(values: Iterable[float], first: int = 1, *, rel: float = 1e-5) -> dict[int, Any]:
    """Values by step from 1 on, to be compared to a share; those from step `first` on."""
    return {step: pytest.approx(value, rel=rel) for step, value in enumerate(values, 1) if step >= first}


def one_ahead(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of a loader, each after the next one was fetched, as Accelerate gives them."""
    batches = iter(loader)
    batch = next(batches)
    while batch is not None:
        ahead = next(batches, None)
        yield batch
        batch = ahead


def sleep(_seconds: float) -> None:
    raise AssertionError("the test does not ask for the fixture `clock`, which sets this")


def nap(seconds: float) -> None:
    """Stands for work: the virtual clock moves on."""
    sleep(seconds)


def about(seconds: float, *naps: float) -> bool:
    """Whether a phase by the virtual clock is as long as these naps."""
    return sum(naps) - 1e-6 <= seconds <= sum(naps) + READINGS_S


def stepping(record: Callable[..., Any]) -> Callable[[], None]:
    """Records a training of a small model, and returns what makes one step of it."""
    model = nn.Linear(2, 1)
    optimizer = sgd(model)
    record(model)
    return lambda: step(optimizer, model(torch.ones(1, 2)).sum())
