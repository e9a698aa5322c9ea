"""Attention over packed documents: many sequences of unequal length in one row, none of which sees another.

Three ways to the same result. "varlen": torch's variable-length kernel (torch.nn.attention.varlen, FlashAttention) on a
GPU in half precision, which computes only what is inside a document. "each": scaled_dot_product_attention document by
document, the same amount of work anywhere. "mask": one call with a block-diagonal mask over all tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from perfagent.errors import ConfigError
from perfagent_loop.checks import check_choice

__all__ = ["PackedMethod", "block_diagonal_mask", "cumulative_lengths", "lengths_of_positions", "packed_attention"]

PackedMethod = Literal["auto", "varlen", "each", "mask"]


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int] | Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    method: PackedMethod = "auto",
) -> Tensor:
    """Attention within each document of a packed row: no document attends to another one.

    For a batch of rows, give `x.flatten(0, 1)` of (rows, tokens, heads, width), and the lengths of all rows.

    Args:
        q: The query, (tokens, heads, width), one document after the other.
        k: The key, (tokens, heads, width). Its heads may be a divisor of the query's.
        v: The value, of the shape of `k`.
        lengths: Tokens of each document, in order. They add up to all tokens; padding at the end is a document of its
            own.
        causal: Whether a token attends only to earlier ones of its document.
        scale: The factor of the scores; 1/sqrt(width) by default.
        method: "varlen": torch's variable-length kernel, on a GPU in half precision. "each": one call for each
            document. "mask": one call with a block-diagonal mask. "auto": varlen if it runs, else each. With lengths on
            a GPU, "each" waits for them: give a list.

    Returns:
        A tensor of the shape of `q`.

    Raises:
        ConfigError: Lengths or shapes do not fit, or "varlen" cannot run here.
    """
    counts = _checked(q, k, v, lengths)
    check_choice("method", method, get_args(PackedMethod))
    obstacle = _varlen_obstacle(q)
    if method == "varlen" and obstacle:
        raise ConfigError(f"the variable-length kernel cannot run: {obstacle}; use method='auto'")
    if method == "varlen" or (method == "auto" and not obstacle):
        return _varlen(q, k, v, counts, causal, scale)
    if method == "mask":
        mask, gqa = block_diagonal_mask(counts, causal=causal, device=q.device), q.shape[1] != k.shape[1]
        query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
        done = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=gqa)
        return done[0].transpose(0, 1)
    return _each(q, k, v, counts, causal, scale)


def block_diagonal_mask(
    lengths: Sequence[int] | Tensor, *, causal: bool = True, device: torch.device | str = "cpu"
) -> Tensor:
    """Which pairs of tokens of a packed row may see each other: boolean, (tokens, tokens), True within a document."""
    counts = _counts(lengths)
    ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts, dtype=torch.long)).to(device)
    same = ids[:, None] == ids[None, :]
    return same.tril() if causal else same


def cumulative_lengths(lengths: Sequence[int] | Tensor, *, device: torch.device | str = "cpu") -> Tensor:
    """Where each document begins, and the end: int32, (documents + 1,), as varlen kernels take it."""
    counts = _counts(lengths)
    ends = torch.zeros(len(counts) + 1, dtype=torch.int32)
    ends[1:] = torch.tensor(counts, dtype=torch.long).cumsum(0)
    return ends.to(device)


def lengths_of_positions(positions: Tensor) -> list[int]:
    """Lengths of the documents from positions, which begin at 0 in each: (tokens,) or (rows, tokens)."""
    flat = positions.reshape(-1)
    begins = (flat == 0).nonzero().flatten().tolist()
    if not begins or begins[0] != 0:
        raise ConfigError("positions must begin with 0, and again in each document; these are not of packed rows")
    return [end - begin for begin, end in zip(begins, [*begins[1:], flat.numel()], strict=True)]


def _varlen(q: Tensor, k: Tensor, v: Tensor, counts: list[int], causal: bool, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = q.shape[1] // k.shape[1]
    if groups > 1:  # torch 2.11 has no enable_gqa here
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    ends = cumulative_lengths(counts, device=q.device)
    longest = max(counts)
    window = (-1, 0) if causal else (-1, -1)
    run: Any = varlen_attn
    result: Tensor = run(q, k, v, ends, ends, longest, longest, scale=scale, window_size=window)
    return result


def _each(q: Tensor, k: Tensor, v: Tensor, counts: list[int], causal: bool, scale: float | None) -> Tensor:
    """Document by document; neighbors of one length go together in one call."""
    parts, begin, gqa = [], 0, q.shape[1] != k.shape[1]
    for length, those in itertools.groupby(counts):
        alike = len([*those])
        piece = slice(begin, begin + length * alike)
        query, key, value = (t[piece].reshape(alike, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        done = scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale, enable_gqa=gqa)
        parts.append(done.transpose(1, 2).flatten(0, 1))
        begin = piece.stop
    return torch.cat(parts)


def _varlen_obstacle(q: Tensor) -> str:
    """Why torch's variable-length kernel cannot take these; empty where it can."""
    if not q.is_cuda:
        return f"it runs on NVIDIA GPUs only, and the tensors are on the {q.device.type}"
    if torch.version.hip is not None:
        return "it is not there on ROCm"
    kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype
    if q.dtype != kind or q.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in float16 and bfloat16, and the tensors are {q.dtype}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return f"{torch.cuda.get_device_name(q.device)} is older than compute capability 8.0"
    if q.shape[-1] > 256 or q.shape[-1] % 8:
        return f"it takes heads whose width is a multiple of 8, up to 256, not {q.shape[-1]}"
    return ""


def _counts(lengths: Any) -> list[int]:
    counts = lengths.tolist() if isinstance(lengths, Tensor) else [int(length) for length in lengths]
    if not counts or not all(type(count) is int and count > 0 for count in counts):
        raise ConfigError(f"lengths are tokens of each document, 1 or more; got {counts!r:.80}; leave out empty ones")
    return counts


def _checked(q: Any, k: Any, v: Any, lengths: Any) -> list[int]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor) or tensor.dim() != 3:
            what = f"a tensor of {tensor.dim()} dimensions" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ConfigError(f"{name} must be (tokens, heads, width), not {what}; flatten a batch's rows")
    counts = _counts(lengths)
    if not sum(counts) == q.shape[0] == k.shape[0] == v.shape[0]:
        raise ConfigError(
            f"the lengths add up to {sum(counts)}, and q, k and v hold {q.shape[0]}, {k.shape[0]} and {v.shape[0]} tokens; "
            "padding at the end is a document of its own"
        )
    if k.shape[1] != v.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ConfigError(f"{k.shape[1]} heads of k, {v.shape[1]} of v: both must be one divisor of q's {q.shape[1]}")
    return counts
