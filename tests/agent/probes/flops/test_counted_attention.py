"""Attention in real steps counts twice a forward pass and four times a backward one, less what is not needed."""

from __future__ import annotations

import pytest
import torch
from counted_step import counted_step, written_by_inductor
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from perfagent.probes.flops.inductor_code import causal_in_compiled_code
from perfagent.probes.flops.op_formulas import causal_share

pytestmark = pytest.mark.usefixtures("nothing_compiled")
BATCH, LENGTH, WIDTH = 2, 24, 32
PAIRS = 3 * 4 * BATCH * LENGTH * LENGTH * WIDTH
"""Of one layer, forward and backward, for all pairs of positions."""


class Attention(nn.Module):
    def __init__(self, width=WIDTH, heads=4, causal=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Language(nn.Module):
    def __init__(self, causal=True):
        super().__init__()
        self.table, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.layers = nn.Sequential(*(Attention(causal=causal) for _ in range(2)))

    def forward(self, ids):
        return cross_entropy(self.head(self.layers(self.table(ids))).flatten(0, 1), ids.flatten())


@pytest.fixture
def ids():
    return torch.randint(0, 50, (BATCH, LENGTH))


def test_the_causal_share_is_the_share_of_pairs():
    for length, keys in ((4, 4), (3, 7), (7, 3)):
        assert causal_share(length, keys) == pytest.approx(float(torch.ones(length, keys).tril().mean()))


@pytest.mark.parametrize("causal", [True, False])
def test_causal_attention_counts_its_pairs_in_one_kernel(record, ids, causal):
    model = Language(causal)
    record(model)
    fused = counted_step(model, lambda m: m(ids))
    with sdpa_kernel(SDPBackend.MATH):
        unfused = counted_step(model, lambda m: m(ids))
    share = (LENGTH + 1) / (2 * LENGTH) if causal else 1.0
    assert fused.attention == pytest.approx(2 * PAIRS * share)
    assert fused.products == 3 * 2 * (4 * WIDTH * WIDTH * 2 + WIDTH * 50) * BATCH * LENGTH
    assert unfused.total == fused.products + 2 * PAIRS


class Coder(nn.Module):
    """Checkpointed or not."""

    def __init__(self, reentrant):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, 8, 3, stride=2), Attention(width=8, heads=2)
        self.reentrant = reentrant

    def loss(self, x):
        codes, again = self.encoder(x).flatten(2).transpose(1, 2), self.reentrant
        decoded = self.decoder(codes) if again is None else checkpoint(self.decoder, codes, use_reentrant=again)
        return decoded.square().mean()

    forward = loss


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_root_that_is_never_called_counts_by_its_gradients(record, reentrant):
    model, x = Coder(reentrant), torch.randn(2, 3, 9, 9)
    record(model)
    for counted in (counted_step(model, lambda m: m.loss(x)), counted_step(model, lambda m: m(x))):
        assert counted.products == 2 * 2 * 16 * (2 * 8 * 27 + 3 * 8 * 8 * 4)
        assert counted.attention == pytest.approx(3 * 4 * 2 * 8 * 16 * 16 * causal_share(16, 16))


FLASH = (
    "    buf = torch.ops.aten._scaled_dot_product_flash_attention.default(view(a, (2, 3), 0), b, c, 0.0, {}, scale=0.2)"
)
WIDE = "    buf = torch.ops.aten._scaled_dot_product_efficient_attention.default(a, b, c, None, True, 0.0, {})"
BACKWARD = "    buf = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(g, a, b, c, d, e, 0.0, False)"
WRITTEN = (
    ((FLASH.format(True), WIDE.format(True), BACKWARD), True),
    ((FLASH.format(False),), False),
    ((FLASH.format(True), WIDE.format(False)), None),
    (("    return args",), None),
)


def test_causality_of_compiled_code_is_read_from_it(record, monkeypatch, tmp_path, ids):
    """Autograd's graph has one node for all that was compiled together."""
    model = torch.compile(Language(), backend="aot_eager")
    model(ids)
    record(model)
    for lines, causal in WRITTEN:
        written_by_inductor(monkeypatch, tmp_path, "def call(args):", *lines)
        assert causal_in_compiled_code() is causal
        share = causal_share(LENGTH, LENGTH) if causal else 1.0
        assert counted_step(model, lambda m: m(ids)).attention == pytest.approx(2 * PAIRS * share), lines
