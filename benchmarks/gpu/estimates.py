"""What a training step takes of the device's memory, beside what `estimate_memory` says before the first one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from report import Result, compared, not_checked
from stage import Stage
from torch import nn
from torch.nn.functional import cross_entropy

from perfagent_loop.estimates.memory import estimate_memory

SHARE = 0.10
MIB = 2**20
Parts = tuple[nn.Module, tuple[torch.Tensor, torch.Tensor], str]
"""The model, inputs and classes, and the optimizer's name."""


def perceptron(size: int) -> Parts:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64 * size, 64 * size), nn.ReLU())]
    return (
        nn.Sequential(*layers, nn.Linear(64 * size, 16)),
        (torch.randn(64 * size, 64 * size), _classes(64 * size)),
        "adamw",
    )


def convolutions(size: int) -> Parts:
    widths = [3, 4 * size, 8 * size, 8 * size]
    layers = [
        layer
        for before, after in itertools.pairwise(widths)
        for layer in (nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU())
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 16))
    return nn.Sequential(*layers, *head), (torch.randn(2 * size, 3, 4 * size, 4 * size), _classes(2 * size)), "momentum"


class Encoder(nn.Module):
    def __init__(self, size: int, *, causal: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32 * size, 4, 128 * size, batch_first=True, norm_first=causal)
        self.embedding, self.encoder = (
            nn.Embedding(256, 32 * size),
            nn.TransformerEncoder(layer, 4, enable_nested_tensor=False),
        )
        self.head, self.causal = nn.Linear(32 * size, 16), causal

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device) if self.causal else None
        return self.head(self.encoder(self.embedding(tokens), mask=mask, is_causal=self.causal)[:, -1])


def encoder(size: int) -> Parts:
    return Encoder(size, causal=False), (torch.randint(0, 256, (2 * size, 16 * size)), _classes(2 * size)), "adamw"


def decoder(size: int) -> Parts:
    return Encoder(size, causal=True), (torch.randint(0, 256, (2 * size, 16 * size)), _classes(2 * size)), "sgd"


class Recurrent(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(16 * size, 32 * size, 2, batch_first=True), nn.Linear(32 * size, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def recurrent(size: int) -> Parts:
    return Recurrent(size), (torch.randn(4 * size, 8 * size, 16 * size), _classes(4 * size)), "adamw"


TRAININGS: tuple[Callable[[int], Parts], ...] = (perceptron, convolutions, encoder, decoder, recurrent)


def check(stage: Stage) -> list[Result]:
    ones = torch.ones(64, 64, device=stage.device, requires_grad=True)
    (ones @ ones).sum().backward()  # each thread that multiplies has a workspace from here on (32 MiB): backward's, too
    return [_compared(stage, make) for make in TRAININGS]


def _classes(count: int) -> torch.Tensor:
    return torch.randint(0, 16, (count,))


def _loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return cross_entropy(output, batch[1])


def _compared(stage: Stage, make: Callable[[int], Parts]) -> Result:
    name = f"memory of a training step: {make.__name__}"
    model, batch, optimizer = make(1 if stage.dry else 16)
    estimate = estimate_memory(model, batch, optimizer=optimizer, loss=_loss, device=stage.device).total_bytes
    measured = _trained(stage, model, batch, optimizer)
    if stage.dry:
        return not_checked(name, f"{estimate / MIB:.2f} MiB by the estimate; a CPU's allocator keeps no peak")
    return compared(name, estimate / MIB, measured / MIB, unit="MiB", share=SHARE, source="max_memory_allocated")


def _trained(stage: Stage, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], named: str) -> int:
    """Bytes of the peak of three steps, beyond what was held before the model came."""
    held = 0
    if not stage.dry:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    model = model.to(stage.device)
    inputs, classes = (part.to(stage.device) for part in batch)
    optimizer = _optimizer(named, model)
    for _ in range(3):
        _loss(model(inputs), (inputs, classes)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return 0 if stage.dry else torch.cuda.max_memory_allocated() - held


def _optimizer(named: str, model: nn.Module) -> torch.optim.Optimizer:
    if named == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=1e-3)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9 if named == "momentum" else 0.0)
