"""Sequence packing: how full the rows get, how long packing takes, and how many tokens a second are trained padded and
packed.

The lengths are drawn from a log-normal distribution with mean 394 and cut at 2048, about those of instruction data.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from perfagent_loop.compute.packed import packed_attention
from perfagent_loop.data.packing import fill, pack
from perfagent_tools.bench.machine import described
from perfagent_tools.bench.measuring import in_turn, medians, seconds, seeded
from perfagent_tools.bench.report import Figure, Report, percent, times

__all__ = ["lengths_like_text", "measure", "padded_fill"]

CAPACITY = 2048
MEAN, SIGMA = 394, 0.9


def lengths_like_text(count: int, capacity: int = CAPACITY, seed: int = 0) -> list[int]:
    draw = random.Random(seed)  # noqa: S311 - lengths, not secrets
    mu = math.log(MEAN * capacity / CAPACITY) - SIGMA**2 / 2
    return [min(capacity, max(1, round(draw.lognormvariate(mu, SIGMA)))) for _ in range(count)]


def padded_fill(lengths: Sequence[int], batch: int) -> float:
    """The share of tokens (0..1) in batches that are padded to their longest."""
    groups = [lengths[begin : begin + batch] for begin in range(0, len(lengths), batch)]
    return sum(lengths) / sum(len(group) * max(group) for group in groups)


def measure(device: torch.device, *, quick: bool = False) -> Report:
    lengths = lengths_like_text(1000 if quick else 50_000)
    rows: list[list[int]] = []
    took = seconds(lambda: rows.extend(pack(lengths, CAPACITY)), torch.device("cpu"))
    by_length = sorted(lengths)
    filled = {
        "padded to the capacity": sum(lengths) / (CAPACITY * len(lengths)),
        "batches of 16, padded": padded_fill(lengths, 16),
        "batches of 16 of like lengths, padded": padded_fill(by_length, 16),
        "packed": fill(rows, lengths, CAPACITY),
    }
    full = 100 * filled["packed"]
    trained = _training(device, quick=quick)
    speed = trained["packed"] / trained["padded"]
    by = "document by document" if device.type == "cpu" else "by the kernel for such rows"
    return Report(
        name="packing",
        device=device.type,
        machine=described(device),
        setup=f"{len(lengths):,} lengths of mean {sum(lengths) / len(lengths):.0f}, rows of {CAPACITY}",
        figures={
            "fill": Figure(
                full,
                f"{full:.2f} % of the packed rows is tokens, packed in {took:.3f} s",
                "Helps while most sequences are shorter than a row and many are there to choose from; documents of one row must "
                "not "
                "see each other (packed_attention), and positions begin anew in each.",
            ),
            "speed": Figure(
                speed,
                f"packed trains {times(speed)} as many tokens per second as batches padded to their longest",
                f"The gain is what padding wasted (here {percent(100 - 100 * filled['batches of 16, padded'])} of the tokens), "
                f"less what attention over packed rows costs: here {by}. Nothing is gained where lengths are alike, or in "
                "batches of like lengths.",
            ),
        },
        beside={"pack_s": took},
        head=["batches", "filled %", "tokens per second"],
        rows=[
            [name, f"{100 * share:.2f}", f"{trained[key]:,.0f}" if (key := _TRAINED.get(name)) else "-"]
            for name, share in filled.items()
        ],
    )


_TRAINED = {"batches of 16, padded": "padded", "packed": "packed"}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Layer(nn.Module):
    """A transformer's layer over tokens (batch, time, width); how they attend is given with each call."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, time, 3, self.heads, -1).unbind(2)
        x = x + self.out(attend(q, k, v).reshape(batch, time, width))
        return x + self.feed(self.feed_norm(x))  # type: ignore[no-any-return]


def _each_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One document a row. Causal: what was padded behind it is seen by nobody."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def _together(lengths: Sequence[int]) -> Attend:
    """Several documents in the one row of the batch."""
    return lambda q, k, v: packed_attention(q[0], k[0], v[0], lengths)[None]


def _training(device: torch.device, *, quick: bool) -> dict[str, float]:
    """Tokens of documents, padding not counted, that are trained in a second; forward and backward over the same
    documents."""
    large = device.type == "cuda"
    capacity, width, heads, layers, count = (
        (CAPACITY, 1024, 16, 4, 256) if large else (64, 32, 2, 1, 32) if quick else (512, 128, 4, 2, 64)
    )
    lengths = lengths_like_text(count, capacity)
    dtype = torch.bfloat16 if large else torch.float32
    with seeded():
        model = nn.ModuleList(_Layer(width, heads) for _ in range(layers)).to(device, dtype)
        data = torch.randn(capacity, width, device=device, dtype=dtype)
    groups = [lengths[begin : begin + 16] for begin in range(0, count, 16)]
    rows = [[lengths[index] for index in row] for row in pack(lengths, capacity)]

    def train(batch: Tensor, attend: Attend) -> None:
        for layer in model:
            batch = layer(batch, attend)
        batch.sum().backward()  # type: ignore[no-untyped-call]

    def padded() -> None:
        for group in groups:
            train(data[: max(group)].expand(len(group), -1, -1), _each_alone)
        model.zero_grad()

    def packed() -> None:
        for row in rows:
            train(data[None, : sum(row)], _together(row))
        model.zero_grad()

    took = medians(in_turn({"padded": padded, "packed": packed}, device, rounds=2 if quick else 7))
    return {name: sum(lengths) / value for name, value in took.items()}
