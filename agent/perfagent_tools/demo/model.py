"""The demo's model: a small GPT over bytes, written out in full so that it can be read beside its charts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["GPT", "VOCABULARY"]

VOCABULARY = 256  # every byte is a token


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each behind a norm and around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """x: (batch, time, width) -> the same shape."""
        batch, time, width = x.shape
        q, k, v = (
            self.qkv(self.attention_norm(x))
            .view(batch, time, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).reshape(batch, time, width))
        return x + self.feed(self.feed_norm(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """About half a million parameters with the defaults: a step takes tens of milliseconds on two cores."""

    def __init__(self, *, width: int = 96, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(_initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 (batch, time) -> logits (batch, time, VOCABULARY)."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def _initialize(module: nn.Module) -> None:
    """GPT-2's 0.02: the first loss is then close to log(256) = 5.55, that of a uniform guess."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        torch.nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        torch.nn.init.zeros_(module.bias)
