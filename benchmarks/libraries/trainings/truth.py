"""What a training of this folder knows of itself: it notes each step, and writes everything down when it ends.

comparing.py compares that with what the agent recorded; nothing here knows the agent. TRUTH names the file; without it,
the truth is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

FOLDER = str(Path.cwd())
"""Where a training may write."""

steps: list[dict[str, float | None]] = []
evaluations: list[int] = []
"""Of each evaluation, how many steps had been made before it."""

_losses: list[float] = []
_samples: list[int] = []


def seed(number: int = 1234) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def loss(value: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch, as it is minimized. Gives it back."""
    _losses.append(float(value.detach()))
    return value


def samples(count: int) -> None:
    """So many of a micro-batch were trained on."""
    _samples.append(count)


def evaluated() -> None:
    if evaluations[-1:] != [len(steps)]:
        evaluations.append(len(steps))


def step(lr: float, combine: Callable[[list[float]], float] | None = None, **known: float) -> None:
    """An optimizer step was made. Its loss is the mean of those noted since the last one, unless `combine` says
    otherwise."""
    noted: dict[str, float | None] = {"lr": float(lr)}
    if _losses:
        noted["loss"] = combine(_losses) if combine else sum(_losses) / len(_losses)
    if _samples:
        noted["samples"] = sum(_samples)
    steps.append(noted | known)
    _losses.clear()
    _samples.clear()


def follow(
    optimizer: Any, combine: Callable[[list[float]], float] | None = None, samples: int = 0, samples_from: int = 1
) -> Any:
    """Notes each step of a torch optimizer by its own hooks. Gives it back.

    samples: of every step from the one numbered samples_from on.
    """
    rate: list[float] = []

    def made(*_: Any) -> None:
        known = {"samples": samples} if samples and len(steps) + 1 >= samples_from else {}
        step(rate.pop(), combine, **known)

    optimizer.register_step_pre_hook(lambda itself, *_: rate.append(itself.param_groups[0]["lr"]))
    optimizer.register_step_post_hook(made)
    return optimizer


def losses_of_backward() -> None:
    """Notes what `backward()` is called on, where no other door leads to the loss."""
    backward = torch.Tensor.backward

    def noting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        loss(tensor)
        backward(tensor, *arguments, **options)

    torch.Tensor.backward = noting  # type: ignore[method-assign]


def last(losses: list[float]) -> float:
    return losses[-1]


def end(*models: nn.Module) -> None:
    """Writes down what was noted, and a digest of every weight and of the random states, as they are now."""
    digest = hashlib.sha256()
    for model in models:
        for tensor in model.state_dict().values():
            if isinstance(tensor, torch.Tensor):
                digest.update(tensor.detach().double().numpy().tobytes())
    states = torch.get_rng_state().numpy().tobytes(), random.getstate(), np.random.get_state()
    digest.update(repr(states).encode())
    whole = json.dumps({"steps": steps, "evaluations": evaluations, "digest": digest.hexdigest()})
    if path := os.environ.get("TRUTH"):
        Path(path).write_text(whole, "utf-8")
    else:
        sys.stdout.write(whole + "\n")


class Net(nn.Module):
    """A small classifier. Notes the samples it is trained on and that it is evaluated."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        first, second = nn.Linear(8, hidden), nn.Linear(hidden, 3)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(hidden), nn.ReLU(), nn.Dropout(0.1), second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            samples(len(x))
        else:
            evaluated()
        return self.layers(x)


class Loss(nn.CrossEntropyLoss):
    """Notes what it gives while training."""

    def forward(self, given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        value = super().forward(given, wanted)
        return loss(value) if value.requires_grad else value


def dataset(count: int) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(count, 8, generator=generator), torch.randint(0, 3, (count,), generator=generator))


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """40 samples to train on, shuffled, and 20 to evaluate with; in batches of 5."""
    return DataLoader(dataset(40), 5, shuffle=True), DataLoader(dataset(20), 5)
