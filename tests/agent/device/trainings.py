"""Small trainings that do not read their losses before they end."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import perfagent

__all__ = ["MADE_OF_TORCH", "Train", "captured", "checkpointing", "mixed_precision", "plain", "value"]

Train = Callable[[str, int], list[Tensor]]
"""(device, steps) -> the losses"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolution = nn.Conv1d(2, 4, 3, padding=1)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.convolution(x)
        inner = self._inner
        hidden = checkpoint(inner, hidden, use_reentrant=False) if self.recomputes else inner(hidden)
        return self.head(hidden)

    def _inner(self, hidden: Tensor) -> Tensor:
        return nn.functional.gelu(self.norm(hidden.flatten(1)))


def _batches(device: str, number: int) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(7)
    made = [(torch.randn(6, 2, 8), torch.randint(0, 5, (6,))) for _ in range(min(number, 8))]
    return [(x.to(device), y.to(device)) for x, y in made]


def _train(device: str, steps: int, *, micro: int = 1, recomputes: bool = False) -> list[Tensor]:
    model, losses = Net().to(device), []
    model.recomputes = recomputes
    # the same form of the optimizer on the CPU, where torch would take another
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    batches = _batches(device, steps)
    for step in range(steps):
        for part in range(micro):
            x, y = batches[(step + part) % len(batches)]
            loss = nn.functional.cross_entropy(model(x), y) / micro
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def plain(device: str, steps: int) -> list[Tensor]:
    return _train(device, steps)


def checkpointing(device: str, steps: int) -> list[Tensor]:
    """In two parts a step."""
    return _train(device, steps, micro=2, recomputes=True)


def loop(device: str, steps: int) -> list[Tensor]:
    model, losses = Net().to(device), []
    loop = perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1), grad_accum=2, clip_norm=1.0)
    batches = _batches("cpu", steps)
    for x, y in loop.batches([batches[step % len(batches)] for step in range(2 * steps)]):
        with loop.forward():
            loss = nn.functional.cross_entropy(model(x), y)
        loop.backward(loss, num_items=len(x))
        loop.step()
        losses.append(loss.detach())
    return losses


def mixed_precision(device: str, steps: int) -> list[Tensor]:
    model, losses = Net().to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kind = torch.device(device).type
    scaler = torch.amp.GradScaler(kind, init_scale=2.0**40, growth_interval=4)  # some steps are skipped
    batches = _batches(device, steps)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        with torch.autocast(kind, torch.float16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def captured(device: str, steps: int) -> list[Tensor]:
    """Whole steps in a graph, which is replayed."""
    model, losses = Net().to(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    [(x, y)] = _batches(device, 1)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with torch.Stream(device):
        losses += [step().clone() for _ in range(3)]
        graph = torch.accelerator.Graph()
        with graph:
            result = step()
        for _ in range(steps - 3):
            graph.replay()
            losses.append(result.clone())
    return losses


MADE_OF_TORCH: tuple[Train, ...] = (plain, checkpointing, loop)
"""Those that compute on the fake devices what they compute on the CPU."""


def value(losses: list[Tensor]) -> list[str]:
    """Read only now, and exactly."""
    return [float(loss).hex() for loss in losses]
