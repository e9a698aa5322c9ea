"""Attention kernels on shapes of your own: time of forward and backward, peak memory, and which one `best_attention`
takes.

Standard attention is torch's math kernel, which writes the whole matrix of scores; FlashAttention is the one that does
not (Dao, "FlashAttention-2", 2023; on a CPU torch's own kernel of that kind).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from perfagent.errors import ConfigError
from perfagent_loop.compute.attention import best_attention
from perfagent_tools.bench.machine import described, has_bf16
from perfagent_tools.bench.measuring import in_turn, medians, peak_bytes, seeded
from perfagent_tools.bench.report import Figure, Report, percent, times

__all__ = ["KERNELS", "Shape", "measure"]

KERNELS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """Of the queries (batch, heads, length, head_dim); keys and values have kv_heads."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    head_dim: int

    def tensors(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        def one(heads: int) -> Tensor:
            return torch.randn(
                self.batch, heads, self.length, self.head_dim, device=device, dtype=dtype, requires_grad=True
            )

        return one(self.heads), one(self.kv_heads), one(self.kv_heads)


@dataclass(frozen=True, slots=True)
class _Measured:
    seconds: float
    peak: int


def measure(
    device: torch.device, *, quick: bool = False, batch: int | None = None, heads: int | None = None, kv_heads: int | None = None,
    lengths: Sequence[int] | None = None, head_dim: int = 64, dtype: str | None = None, causal: bool = True,
) -> Report:  # fmt: skip
    large = device.type == "cuda"
    batch, heads = batch or (8 if large else 2), heads or (16 if large else 4)
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ConfigError(f"--heads is {heads} and --kv-heads {kv_heads}: the first must be a multiple of the second")
    dtype = dtype or ("bf16" if large and has_bf16(device) else "fp16" if large else "fp32")
    lengths = lengths or ((64, 128) if quick else (128, 256, 512, 1024, 2048))
    found: dict[int, dict[str, _Measured]] = {}
    chosen: dict[int, str] = {}
    with seeded():
        for length in lengths:
            shape = Shape(batch, heads, kv_heads, length, head_dim)
            q, k, v = shape.tensors(device, _DTYPES[dtype])
            chosen[length] = best_attention(q, k, v, causal=causal, gqa=kv_heads != heads).kernel
            found[length] = _kernels(q, k, v, causal=causal, rounds=2 if quick else 7)
    rows = [
        [
            str(length),
            name,
            f"{1000 * one.seconds:.2f}",
            f"{by_kernel['math'].seconds / one.seconds:.2f}",
            f"{one.peak / 2**20:.1f}",
            "taken" if name == chosen[length] else "",
        ]
        for length, by_kernel in found.items()
        for name, one in by_kernel.items()
    ]
    return Report(
        name="attention",
        device=device.type,
        machine=described(device),
        setup=f"queries ({batch}, {heads}, length, {head_dim}), {kv_heads} heads of keys, {dtype}, "
        f"{'causal' if causal else 'not causal'}; forward and backward",
        figures=_figures(found),
        head=["length", "kernel", "ms", "to math", "peak MiB", "best_attention"],
        rows=rows,
    )


def _kernels(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, rounds: int) -> dict[str, _Measured]:
    """What each kernel takes that runs on these tensors at all."""
    grouped = q.shape[1] != k.shape[1]

    def attend(kernel: SDPBackend) -> Callable[[], None]:
        def call() -> None:
            with sdpa_kernel(kernel):
                out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
            out.sum().backward()  # type: ignore[no-untyped-call]
            q.grad = k.grad = v.grad = None

        return call

    ways: dict[str, Callable[[], None]] = {}
    for name, kernel in KERNELS.items():
        way = attend(kernel)
        try:
            way()
        except RuntimeError:  # "No available kernel", or "No viable backend"
            continue
        ways[name] = way
    peak = {name: peak_bytes(way, q.device) for name, way in ways.items()}
    took = medians(in_turn(ways, q.device, rounds=rounds))
    return {name: _Measured(took[name], peak[name]) for name in ways}


def _figures(found: dict[int, dict[str, _Measured]]) -> dict[str, Figure]:
    def gain(length: int) -> float | None:
        by_kernel = found[length]
        return by_kernel["math"].seconds / by_kernel["flash"].seconds if {"math", "flash"} <= by_kernel.keys() else None

    gains = {length: value for length in found if (value := gain(length)) is not None}
    if not gains:
        none = Figure(
            None,
            "the flash kernel does not run on these shapes",
            "Needs fp16 or bf16, and heads that are not too wide.",
        )
        return dict.fromkeys(("speed", "memory", "short"), none)
    longest = max(gains)
    at = found[longest]
    saved = 100 * (1 - at["flash"].peak / at["math"].peak)
    short = {length: value for length, value in gains.items() if length < SHORT}
    slower = [length for length, value in gains.items() if value < 1]
    crossing = (
        f"on these shapes flash is slower at {', '.join(map(str, slower))} tokens"
        if slower
        else "on these shapes flash is slower nowhere"
    )
    shortest = max(short.values()) if short else None
    return {
        "speed": Figure(
            gains[longest],
            f"flash is {times(gains[longest])} as fast as math at {longest} tokens",
            "Grows with the length, since the matrix of scores is what is not written. A step that spends a share s in "
            "attention gets 1 / (1 - s + s / gain) times as fast; `perfagent profile RUN` shows s.",
        ),
        "memory": Figure(
            saved, f"flash takes {percent(saved)} less memory at {longest} tokens",
            "Grows with the length: linear instead of square. Short sequences save little.",
        ),
        "short": Figure(
            shortest,
            f"no length below {SHORT} was asked for"
            if shortest is None
            else f"below {SHORT} tokens flash is up to {times(shortest)} as fast",
            f"Where the two cross depends on processor, heads and type: {crossing}. Measure, and do not switch at a fixed "
            "length.",
        ),
    }  # fmt: skip
