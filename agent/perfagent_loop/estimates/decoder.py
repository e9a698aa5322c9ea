"""A decoder of a given shape on the meta device, to estimate a model of which only the size is known."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_count

__all__ = ["Decoder", "DecoderShape", "count_read", "shape_of"]

_RATIO = 128
"""Width over layers of published decoders (Kaplan et al., 2020, find 20 to 200 equally good)."""
_STEP = 128
_MOST_OFF = 0.5
"""Small ones come in coarse steps: of 1 million, a third more or less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """layers, width, heads, vocabulary: as in the configuration of a language model."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 32000

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "vocabulary"):
            check_count(name, getattr(self, name))
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} cannot be divided by {self.heads} heads")


_TIMES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


def count_read(text: str) -> int:
    """A count such as 7B, 1.3e9 or 350M. Raises ConfigError."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([kmbgt]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"{text!r:.60} is no count; write it as 7B, 350M or 1.3e9")
    return round(float(match[1]) * _TIMES[match[2]])


def shape_of(parameters: int, *, vocabulary: int = 32000) -> DecoderShape:
    """A shape with about so many parameters: 12 width² a layer, and the vocabulary twice. Raises ConfigError."""
    if parameters < 10**6:
        raise ConfigError(f"{parameters} parameters are no language model; give 1M or more")
    best: tuple[float, DecoderShape] | None = None
    for layers in range(1, 200):
        twelfth = vocabulary / 12
        exact = ((twelfth**2 + parameters * layers / 12) ** 0.5 - twelfth) / layers  # of the quadratic equation
        width = max(1, round(exact / _STEP)) * _STEP
        off = abs(12 * layers * width**2 + 2 * vocabulary * width - parameters) / parameters
        shaped = abs(width / layers / _RATIO - 1)
        score = off * 20 + shaped
        if best is None or score < best[0]:
            best = (score, DecoderShape(layers=layers, width=width, heads=width // _STEP, vocabulary=vocabulary))
    assert best is not None
    made = 12 * best[1].layers * best[1].width ** 2 + 2 * vocabulary * best[1].width
    if abs(made / parameters - 1) > _MOST_OFF:
        raise ConfigError(f"there is no decoder of {parameters:,} parameters with a vocabulary of {vocabulary:,}")
    return best[1]


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.feed_norm = nn.RMSNorm(width)
        inner = max(1, round(8 * width / 3 / 64)) * 64  # three matrices with the weights of two of four times the width
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        seen = self.attention_norm(x)
        q, k, v = (
            project(seen).view(batch, time, self.heads, width // self.heads).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).reshape(batch, time, width))
        seen = self.feed_norm(x)
        return x + self.down_proj(functional.silu(self.gate_proj(seen)) * self.up_proj(seen))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """Of Llama's kind. forward: int64 (batch, time) twice, tokens and targets -> the loss."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        with torch.device("meta"):
            self.token = nn.Embedding(shape.vocabulary, shape.width)
            self.layers = nn.ModuleList(_Layer(shape.width, shape.heads) for _ in range(shape.layers))
            self.norm = nn.RMSNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
