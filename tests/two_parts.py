"""A model of an encoder and a head, one of which may be left out of the training by mistake."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["TwoParts"]


class TwoParts(nn.Module):
    """detach: no gradient comes to the encoder, of 272 numbers; the head has 17. vocabulary: the encoder is a table of
    so many words."""

    def __init__(self, *, detach: bool = False, vocabulary: int = 0) -> None:
        super().__init__()
        self.detach = detach
        self.encoder: nn.Module = nn.Embedding(vocabulary, 16) if vocabulary else nn.Linear(16, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.encoder(x)
        made: Tensor = self.head(hidden.detach() if self.detach else hidden)
        return made
