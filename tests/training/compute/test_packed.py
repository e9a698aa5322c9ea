"""Packed attention: every way gives what each document gives alone, forward and backward."""

from __future__ import annotations

import itertools

import pytest
import torch

from perfagent_loop.compute.packed import (
    cumulative_lengths,
    lengths_of_positions,
    packed_attention,
)

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = [5, 1, 7, 7, 12]


def rows(lengths, heads=4, key_heads=None, width=8, *, dtype=torch.float64, device="cpu"):
    torch.manual_seed(0)
    return [
        torch.randn(sum(lengths), count, width, dtype=dtype, device=device, requires_grad=True)
        for count in (heads, key_heads or heads, key_heads or heads)
    ]


def alone(q, k, v, lengths, *, causal):
    """Each document by itself, written down as matrix products."""
    groups, begin, parts = q.shape[1] // k.shape[1], 0, []
    for length in lengths:
        a, b, c = (t[begin : begin + length].transpose(0, 1) for t in (q, k, v))
        b, c = b.repeat_interleave(groups, 0), c.repeat_interleave(groups, 0)
        scores = a @ b.transpose(1, 2) / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(
                ~torch.ones(length, length, dtype=torch.bool, device=q.device).tril(), float("-inf")
            )
        parts.append((scores.softmax(-1) @ c).transpose(0, 1))
        begin += length
    return torch.cat(parts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [None, 2, 1])
def test_all_ways_give_what_each_document_gives_alone(device, causal, key_heads):
    q, k, v = rows(LENGTHS, key_heads=key_heads, device=device)
    expected = alone(q, k, v, LENGTHS, causal=causal)
    weight = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weight).sum(), (q, k, v))
    for method, lengths in itertools.product(("auto", "each", "mask"), (LENGTHS, torch.tensor(LENGTHS))):
        given = packed_attention(q, k, v, lengths, causal=causal, method=method)
        torch.testing.assert_close(given, expected)
        for mine, yours in zip(torch.autograd.grad((given * weight).sum(), (q, k, v)), wanted, strict=True):
            torch.testing.assert_close(mine, yours)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [None, 2])
def test_the_variable_length_kernel_agrees_with_the_mask(causal, key_heads):
    q, k, v = rows(LENGTHS, key_heads=key_heads, dtype=torch.bfloat16, device="cuda")
    mask = packed_attention(q, k, v, LENGTHS, causal=causal, method="mask")
    varlen = packed_attention(q, k, v, LENGTHS, causal=causal)
    torch.testing.assert_close(varlen, mask, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(varlen, packed_attention(q, k, v, LENGTHS, causal=causal, method="varlen"))


def test_lengths_positions_and_cumulative_lengths_say_the_same():
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    assert lengths_of_positions(positions) == LENGTHS
    assert lengths_of_positions(torch.stack([torch.arange(4), torch.tensor([0, 1, 0, 1])])) == [4, 2, 2]
    ends = cumulative_lengths(LENGTHS)
    assert (ends.dtype, ends.tolist()) == (torch.int32, [0, 5, 6, 13, 20, 32])
