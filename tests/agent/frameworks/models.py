"""Small models and data for the loops."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

CLASSES, WIDTH, VOCABULARY, LENGTH = 4, 16, 61, 12


class Points(TensorDataset):
    """`count` vectors with a class each."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, WIDTH, generator=generator)
        self.y = torch.randint(0, CLASSES, (count,), generator=generator)
        super().__init__(self.x, self.y)


def classifier(*, dropout: float = 0.1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.LayerNorm(32), nn.GELU(), nn.Dropout(dropout), nn.Linear(32, CLASSES))


def language() -> nn.Sequential:
    """A model of characters; gives logits."""
    return nn.Sequential(nn.Embedding(VOCABULARY, 24), nn.Tanh(), nn.Linear(24, VOCABULARY))
