"""Attention seen from outside, in models that know nothing of it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import perfagent
from perfagent.errors import ConfigError


class Head(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), dropout

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


def test_calls_are_counted_and_slow_ones_warned_of(caplog):
    def trained():
        torch.manual_seed(3)
        model.zero_grad()
        model(x).sum().backward()
        return [*(parameter.grad.clone() for parameter in model.parameters()), torch.rand(2)]

    model, x = nn.Sequential(Head(), Head(), Head(dropout=0.2)), torch.randn(2, 6, 16)
    original, expected = functional.scaled_dot_product_attention, trained()
    with caplog.at_level(logging.WARNING, logger="perfagent"), perfagent.watch_attention(model) as seen:
        watched = trained()
    assert [(call.count, call.shape, call.choice.kernel) for call in seen.calls] == [
        (2, (2, 2, 6, 8), "flash"),
        (1, (2, 2, 6, 8), "math"),
    ]
    assert len(caplog.records) == 1
    assert "dropout" in caplog.text
    assert "2 x (2, 2, 6, 8) float32: flash" in str(seen)
    assert functional.scaled_dot_product_attention is original
    assert all(torch.equal(mine, yours) for mine, yours in zip(watched, expected, strict=True))


@pytest.mark.parametrize(("weights", "kernel"), [(True, "explicit"), (False, "flash")])
def test_multi_head_attention_is_slow_with_weights(weights, kernel, caplog):
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 6, 16)
    original = functional.scaled_dot_product_attention
    with caplog.at_level(logging.WARNING, logger="perfagent"), perfagent.watch_attention(attention) as seen:
        for _ in range(2):
            attention(x, x, x, need_weights=weights)
    assert [(call.count, call.shape, call.choice.kernel) for call in seen.calls] == [(2, (3, 2, 6, 8), kernel)]
    assert len(caplog.records) == weights
    assert ("need_weights=False" in str(seen)) == weights
    assert functional.scaled_dot_product_attention is original


@pytest.mark.frameworks
def test_a_model_of_hugging_face_is_seen_as_it_was_loaded(caplog):
    from transformers import LlamaConfig, LlamaForCausalLM

    def seen_in(how):
        shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=31, attn_implementation=how, **shape))
        with perfagent.watch_attention(model) as seen:
            model(input_ids=torch.randint(0, 31, (2, 9)))
        return seen

    sdpa = seen_in("sdpa")
    assert [(call.count, call.choice.kernel) for call in sdpa.calls] == [(3, "flash")]
    assert not sdpa.slow
    with caplog.at_level(logging.WARNING, logger="perfagent"):
        eager = seen_in("eager")
    assert [call.choice.kernel for call in eager.slow] == ["explicit"]
    assert "attn_implementation" in caplog.text


def test_an_error_of_the_model_passes_through():
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 6, 16)
    original = functional.scaled_dot_product_attention
    with pytest.raises(AssertionError, match="does not match"), perfagent.watch_attention(warn=False):
        attention(x, x[:, :3], x, need_weights=False)
    assert functional.scaled_dot_product_attention is original
    with pytest.raises(ConfigError, match="torch module"), perfagent.watch_attention("llama"):
        pass
