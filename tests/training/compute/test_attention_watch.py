"""Attention seen from outside, in models that know nothing of it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import perfagent


class Head(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def attention_is_put_back(caplog):
    caplog.set_level(logging.WARNING, "perfagent")
    original = functional.scaled_dot_product_attention
    yield
    assert functional.scaled_dot_product_attention is original


def kernels(seen):
    return [(call.count, call.shape, call.choice.kernel) for call in seen.calls]


def test_calls_are_counted_and_slow_ones_warned_of(caplog):
    def trained():
        torch.manual_seed(3)
        model.zero_grad()
        model(x).sum().backward()
        return [*(parameter.grad.clone() for parameter in model.parameters()), torch.rand(2)]

    model, x = nn.Sequential(Head(), Head(), Head(dropout=0.2)), torch.randn(2, 6, 16)
    expected = trained()
    with perfagent.watch_attention(model) as seen:
        torch.testing.assert_close(trained(), expected, rtol=0, atol=0)
    assert kernels(seen) == [(2, (2, 2, 6, 8), "flash"), (1, (2, 2, 6, 8), "math")]
    [warned] = caplog.messages
    assert "dropout" in warned
    assert "2 x (2, 2, 6, 8) float32: flash" in str(seen)


@pytest.mark.parametrize(("weights", "kernel"), [(True, "explicit"), (False, "flash")])
def test_multi_head_attention_is_slow_with_weights(weights, kernel, caplog):
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 6, 16)
    with perfagent.watch_attention(attention) as seen:
        for _ in range(2):
            attention(x, x, x, need_weights=weights)
    assert kernels(seen) == [(2, (3, 2, 6, 8), kernel)]
    assert len(caplog.records) == weights
    assert ("need_weights=False" in str(seen)) == weights
    with pytest.raises(AssertionError, match="does not match"), perfagent.watch_attention(warn=False):
        attention(x, x[:, :3], x, need_weights=weights)


@pytest.mark.frameworks
@pytest.mark.parametrize(("how", "calls"), [("sdpa", (3, (2, 2, 9, 8), "flash")), ("eager", (1, (), "explicit"))])
def test_a_model_of_hugging_face_is_seen_as_it_was_loaded(how, calls, caplog):
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, attn_implementation=how, **shape))
    with perfagent.watch_attention(model) as seen:
        model(input_ids=torch.randint(0, 31, (2, 9)))
    assert kernels(seen) == [calls]
    assert bool(seen.slow) == ("attn_implementation" in caplog.text) == (how == "eager")
