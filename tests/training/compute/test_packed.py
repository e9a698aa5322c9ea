"""Packed attention: every way gives what each document gives alone, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from perfagent_loop.compute.packed import cumulative_lengths, lengths_of_positions, packed_attention

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LENGTHS = [5, 1, 7, 7, 12]


def rows(key_heads, *, dtype=torch.float64, device="cpu"):
    return [torch.randn(32, n, 8, dtype=dtype, device=device, requires_grad=True) for n in (4, key_heads, key_heads)]


def alone(q, k, v, *, causal):
    """Each document by itself."""
    parts = zip(*(t.transpose(0, 1).split(LENGTHS, dim=1) for t in (q, k, v)), strict=True)
    each = [scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True) for part in parts]
    return torch.cat(each, dim=1).transpose(0, 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_all_ways_give_what_each_document_gives_alone(device, causal, key_heads):
    inputs = rows(key_heads, device=device)
    expected = alone(*inputs, causal=causal)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for method, lengths in (("auto", LENGTHS), ("each", torch.tensor(LENGTHS)), ("mask", LENGTHS)):
        given = packed_attention(*inputs, lengths, causal=causal, method=method)
        assert_close(given, expected)
        assert_close(torch.autograd.grad((given * weight).sum(), inputs), gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_variable_length_kernel_agrees_with_the_mask(causal, key_heads):
    inputs = rows(key_heads, dtype=torch.bfloat16, device="cuda")
    varlen = packed_attention(*inputs, LENGTHS, causal=causal, method="varlen")
    assert_close(packed_attention(*inputs, LENGTHS, causal=causal), varlen)
    masked = packed_attention(*inputs, LENGTHS, causal=causal, method="mask")
    assert_close(varlen, masked, rtol=2e-2, atol=2e-2)


def test_lengths_positions_and_cumulative_lengths_say_the_same():
    assert lengths_of_positions(torch.cat([torch.arange(length) for length in LENGTHS])) == LENGTHS
    assert lengths_of_positions(torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])) == [4, 2, 2]
    ends = cumulative_lengths(LENGTHS)
    assert (ends.dtype, ends.tolist()) == (torch.int32, [0, 5, 6, 13, 20, 32])
