"""A small training that tests save and resume: a model, its optimizer and a loop over fixed batches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from big_batches import batches_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.loop import Loop, loop


def small_loop(folder: Path | None = None, *, grad_accum: int = 1, **settings: Any) -> Loop:
    """With a checkpoint below `folder`, if one is given; settings are the checkpoint's."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    settings.setdefault("emergency", False)
    checkpoint = None if folder is None else Checkpoint(folder, **settings)
    return loop(model, optimizer, schedule, grad_accum=grad_accum, checkpoint=checkpoint)


def batches(rows: int = 24, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*batches_of([rows])[0]), **{"batch_size": 4, "shuffle": True} | options)


def train(
    training: Loop,
    epochs: int = 2,
    *,
    steps: int | None = None,
    before: Callable[[], float] = lambda: 1.0,
    step: Callable[[Loop], object] = Loop.step,
) -> list[float]:
    """The losses, exactly. before: called in front of each step, for a factor of its loss; step: in place of the loop's."""
    losses = []
    for inputs, targets in training.batches(batches(), epochs=epochs, steps=steps):
        factor = before()
        with training.forward():
            loss = (training.model(inputs) - targets).square().mean()
        training.backward(loss * factor)
        step(training)
        losses.append(loss.item())
    return losses
