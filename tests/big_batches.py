"""A small training, and the truth about it: what one process makes of it that has a big batch for each window."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

__all__ = ["Batch", "Net", "Stream", "adamw", "batches_of", "big_batches", "flat", "loss_of", "net"]

Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def net() -> Net:
    torch.manual_seed(3)
    return Net()


def batches_of(sizes: list[int], seed: int = 5) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, 4, generator=generator), torch.randn(size, 2, generator=generator)) for size in sizes]


class Stream(IterableDataset[Batch]):
    """Nobody knows how many there are."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def loss_of(model: Callable[[Tensor], Tensor], batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def flat(model: nn.Module) -> Tensor:
    """All weights, also of shards."""
    parameters = [*model.parameters()]
    with contextlib.ExitStack() as stack:
        if hasattr(parameters[0], "ds_id"):
            stack.enter_context(sys.modules["deepspeed"].zero.GatheredParameters(parameters))
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in (q.detach() for q in parameters)]
        return torch.cat([one.reshape(-1) for one in whole])


def big_batches(
    ranks: list[list[Batch]], accumulated: int, *, steps: int, clip: float = float("inf"), as_whole: bool = True
) -> tuple[Tensor, list[float]]:
    """The truth, weights and norms: one process that trains on all that the ranks see in a window, as one big batch or by
    the mean over its micro-steps."""
    model, norms = net(), []
    optimizer = adamw(model)
    for begin in itertools.islice(itertools.cycle(range(0, max(map(len, ranks)), accumulated)), steps):
        window = [batch for of_rank in ranks for batch in of_rank[begin : begin + accumulated]]
        parts = [(torch.cat([x for x, _ in window]), torch.cat([y for _, y in window]))] if as_whole else window
        torch.stack([loss_of(model, part) for part in parts]).mean().backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        optimizer.zero_grad()
    return flat(model), norms
