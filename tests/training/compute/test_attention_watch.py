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
    def __init__(self, dropout=0.0, mask=None):
        super().__init__()
        self.qkv, self.dropout, self.mask = nn.Linear(16, 48), dropout, mask

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, self.mask, self.dropout, is_causal=self.mask is None)
        return x + y.transpose(1, 2).flatten(2)


def test_calls_of_one_kind_are_counted_and_the_slow_ones_warned_of(caplog):
    model, x = nn.Sequential(Head(), Head(), Head(dropout=0.2)), torch.randn(2, 6, 16)
    original = functional.scaled_dot_product_attention
    with caplog.at_level(logging.WARNING, logger="perfagent"), perfagent.watch_attention(model) as seen:
        model(x)
    assert [(call.count, call.shape, call.choice.kernel) for call in seen.calls] == [
        (2, (2, 2, 6, 8), "flash"),
        (1, (2, 2, 6, 8), "math"),
    ]
    assert len(caplog.records) == 1
    assert "dropout" in caplog.text
    assert "2 x (2, 2, 6, 8) float32: flash" in str(seen)
    assert functional.scaled_dot_product_attention is original


def test_watching_changes_no_result_and_no_random_number():
    model, x = nn.Sequential(Head(), Head(dropout=0.2)), torch.randn(2, 6, 16)
    torch.manual_seed(3)
    model(x).sum().backward()
    expected, numbers = [parameter.grad.clone() for parameter in model.parameters()], torch.rand(2)
    model.zero_grad()
    torch.manual_seed(3)
    with perfagent.watch_attention(warn=False):
        model(x).sum().backward()
    assert torch.equal(torch.rand(2), numbers)
    assert all(torch.equal(parameter.grad, mine) for parameter, mine in zip(model.parameters(), expected, strict=True))


@pytest.mark.parametrize(("weights", "kernel"), [(True, "explicit"), (False, "flash")])
def test_multi_head_attention_is_slow_while_its_weights_are_wanted(weights, kernel, caplog):
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 6, 16)
    original = functional.scaled_dot_product_attention
    with caplog.at_level(logging.WARNING, logger="perfagent"), perfagent.watch_attention(attention) as seen:
        attention(x, x, x, need_weights=weights)
        attention(x, x, x, need_weights=weights)
    assert [(call.count, call.shape, call.choice.kernel) for call in seen.calls] == [(2, (3, 2, 6, 8), kernel)]
    assert len(caplog.records) == weights
    assert ("need_weights=False" in str(seen)) == weights
    assert functional.scaled_dot_product_attention is original


def test_a_mask_that_hides_nothing_is_found_in_the_model_that_makes_it():
    with perfagent.watch_attention(warn=False) as seen:
        Head(mask=torch.zeros(6, 6))(torch.randn(2, 6, 16))
    assert "leave the mask out" in str(seen)


def test_a_model_of_hugging_face_is_seen_as_it_was_loaded(caplog):
    from transformers import LlamaConfig, LlamaForCausalLM

    def seen_in(how):
        config = LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, attn_implementation=how,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
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


def test_nothing_seen_says_so_and_an_error_of_the_model_passes_through():
    with perfagent.watch_attention(warn=False) as seen:
        torch.randn(2, 2)
    assert "no attention was called" in str(seen)
    attention, x = nn.MultiheadAttention(16, 2, batch_first=True), torch.randn(3, 6, 16)
    original = functional.scaled_dot_product_attention
    with pytest.raises(AssertionError, match="does not match"), perfagent.watch_attention(warn=False):
        attention(x, x[:, :3], x, need_weights=False)
    assert functional.scaled_dot_product_attention is original
    with pytest.raises(ConfigError, match="torch module"), perfagent.watch_attention("llama"):
        pass
