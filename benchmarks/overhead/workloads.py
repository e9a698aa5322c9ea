"""The training steps whose cost the trackers are measured against: CPU, one torch thread, fixed seeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["WORKLOADS", "Workload", "make"]

CONTEXT = 16
VOCABULARY = 64


class CharMLP(nn.Module):
    """A context of 16 characters -> the next one. With the defaults about 0.9 million parameters in 7 tensors."""

    def __init__(self, embedding: int = 32, hidden: int = 704) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, embedding)
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(CONTEXT * embedding, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.Linear(hidden, VOCABULARY),
        )

    def forward(self, characters: Tensor) -> Tensor:
        return self.layers(self.embedding(characters))


class CharTransformer(nn.Module):
    """Next character at every position. With the defaults 5 million parameters in 306 tensors."""

    def __init__(self, width: int = 128, layers: int = 25, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)).flatten(0, 1)


@dataclass(slots=True)
class Workload:
    """step() is one full training step and returns the loss, still a tensor."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], Tensor]


# name -> sizes of the model and the batch. `mlp` takes about 6 ms a step on one core; `tiny` has the same tensors, but
# so small that a few microseconds of hooks show beside it. And two transformers: `deep` of many tensors, `transformer`
# of large ones.
WORKLOADS = {"mlp": (32, 704, 16), "tiny": (2, 4, 2)}


def make(name: str) -> Workload:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if name == "deep":
        return of_sequences(CharTransformer())
    if name == "transformer":
        return of_sequences(CharTransformer(width=368, layers=6, heads=8))
    embedding, hidden, batch = WORKLOADS[name]
    text = torch.randint(0, VOCABULARY, (50_000,), generator=torch.Generator().manual_seed(2))
    model = CharMLP(embedding, hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    order = torch.Generator().manual_seed(1)

    def step() -> Tensor:
        begins = torch.randint(0, len(text) - CONTEXT - 1, (batch,), generator=order).tolist()
        characters = torch.stack([text[i : i + CONTEXT] for i in begins])
        targets = torch.stack([text[i + CONTEXT] for i in begins])
        loss = nn.functional.cross_entropy(model(characters), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Workload(model, optimizer, step)


def of_sequences(model: nn.Module) -> Workload:
    """Two sequences of 16 characters a step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    order = torch.Generator().manual_seed(1)

    def step() -> Tensor:
        characters = torch.randint(0, VOCABULARY, (2, CONTEXT), generator=order)
        loss = nn.functional.cross_entropy(model(characters), characters.roll(-1, 1).flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return Workload(model, optimizer, step)
