"""What the agent sees of a training through perfagent.loop, which tells it nothing but the loss that it cannot see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import perfagent
from perfagent import session

Batch = tuple[Tensor, Tensor]


@pytest.fixture
def watched(record: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """watched(model): a recorded run that is the current one."""

    def start(model: nn.Module) -> Any:
        recorded = record(model)
        monkeypatch.setattr(session, "_current", recorded.run)
        return recorded

    return start


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def batches_of(sizes: list[int]) -> list[Batch]:
    return [(torch.randn(size, 5), torch.randn(size, 1)) for size in sizes]


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


class Stream(IterableDataset[Batch]):
    """No length."""

    def __init__(self, batches: list[Batch]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)


def run(loop: perfagent.Loop, loader: Any, *, counts: bool, items: Any = None) -> None:
    for batch in loop.batches(loader, items=items):
        with loop.forward():
            loss = loss_of(loop.model, batch)
        loop.backward(loss, len(batch[0]) if counts else None)
        loop.step()


def test_loss_is_the_mean_over_a_window_and_its_phases_are_known(watched: Any) -> None:
    data = batches_of([1, 7, 3, 3])
    model = net()
    recorded = watched(model)
    loop = perfagent.loop(model, sgd(model, lr=0.0), grad_accum=2, clip_norm=1.0)
    run(loop, DataLoader(Stream(data), batch_size=None), counts=True)
    with torch.no_grad():
        means = [
            float(loss_of(model, (torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])))) for a, b in (data[:2], data[2:])
        ]
    assert recorded.of("loss") == [(1, pytest.approx(means[0], rel=1e-6)), (2, pytest.approx(means[1], rel=1e-6))]
    phases = {f"phase/{name}_s" for name in ("data", "forward", "backward", "optimizer")}
    assert {"loss", "lr", "grad/norm", *phases} <= {name for _, values in recorded.rows for name in values}
