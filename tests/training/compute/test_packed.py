"""Packed attention: every way gives what each document gives alone, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.testing import assert_close

from perfagent_loop.compute.packed import cumulative_lengths, lengths_of_positions, packed_attention

LENGTHS = [5, 1, 7, 7, 12]


def alone(q, k, v, *, causal):
    """Each document by itself."""
    parts = zip(*(t.transpose(0, 1).split(LENGTHS, dim=1) for t in (q, k, v)), strict=True)
    each = [scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True) for part in parts]
    return torch.cat(each, dim=1).transpose(0, 1)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_all_ways_give_what_each_document_gives_alone(causal, key_heads):
    heads = (4, key_heads, key_heads)
    inputs = [torch.randn(32, n, 8, dtype=torch.float64, requires_grad=True) for n in heads]
    expected = alone(*inputs, causal=causal)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for method, lengths in (("auto", LENGTHS), ("each", torch.tensor(LENGTHS)), ("mask", LENGTHS)):
        given = packed_attention(*inputs, lengths, causal=causal, method=method)
        assert_close(given, expected)
        assert_close(torch.autograd.grad((given * weight).sum(), inputs), gradients)


def test_lengths_positions_and_cumulative_lengths_say_the_same():
    assert lengths_of_positions(torch.cat([torch.arange(length) for length in LENGTHS])) == LENGTHS
    assert lengths_of_positions(torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])) == [4, 2, 2]
    ends = cumulative_lengths(LENGTHS)
    assert (ends.dtype, ends.tolist()) == (torch.int32, [0, 5, 6, 13, 20, 32])
