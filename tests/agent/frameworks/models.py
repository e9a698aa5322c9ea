"""Small models and data for the loops."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import Dataset

CLASSES, WIDTH, VOCABULARY, LENGTH = 4, 16, 61, 12


class Points(Dataset):
    """`count` vectors with a class each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = torch.randint(0, CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def classifier(*, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, CLASSES))


class Language(nn.Module):
    """A character model: an embedding, a recurrent layer, a head; returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 24)
        self.layer = nn.GRU(24, 24, batch_first=True)
        self.head = nn.Linear(24, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens))[0])


def language_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
