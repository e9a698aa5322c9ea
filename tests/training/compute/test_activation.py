"""Activation checkpointing: the same losses, gradients, state and random numbers, and less memory."""

from __future__ import annotations

import copy
import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from perfagent.errors import ConfigError
from perfagent_loop.compute.activation import checkpoint_activations


def layer(dropout=0.2):
    return nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True)


class Moving(nn.Module):
    """Changes buffers as it runs, and draws from every generator: torch's own checkpoint does both twice."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32)), nn.BatchNorm1d(32)

    def forward(self, x):
        x = x * (1.0 + random.random()) * float(np.random.rand() + 1.0)
        return x + torch.relu(self.norm(self.linear(x))) * torch.rand(32)


def stacked(block=layer):
    return nn.Sequential(nn.Sequential(*(block() for _ in range(4))), nn.Linear(32, 7))


def trained(model, x, mode=None):
    """Losses, gradients, state, and the next random numbers."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = copy.deepcopy(model)
    if mode is not None:
        checkpoint_activations(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for is_training in (False, True, True, True):  # blocks that change nothing at first change their buffers later
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_training):
            loss = model.train(is_training)(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = [parameter.grad for parameter in model.parameters()]
    return losses, gradients, model.state_dict(), torch.rand(3), (random.random(), np.random.rand())


@pytest.mark.parametrize("block", [layer, Moving])
@pytest.mark.parametrize(
    "mode", ["all", "every:2", "every:5", "selective", lambda name, module: name in ("0.0", "0.3")]
)
def test_training_is_the_same_bit_by_bit(block, mode):
    model, x = stacked(block), torch.randn(16, 32)
    assert_close(trained(model, x, mode), trained(model, x), rtol=0, atol=0)


def test_selective_computes_no_product_again_and_all_does():
    model, x = stacked(lambda: layer(dropout=0.0)), torch.randn(2, 10, 32)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    class Executed(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            executed.append(func)
            return func(*args, **(kwargs or {}))

    for mode, keep, again in (
        ("selective", None, (0, 0)), ("every:2", None, (6, 2)), ("all", None, (12, 4)), ("all", [attention], (12, 0)),
    ):  # fmt: skip
        executed = []
        undo = checkpoint_activations(model, mode, **({"keep": keep} if keep else {}))
        loss = model(x).square().mean()
        with Executed():
            loss.backward()
        undo()
        assert (executed.count(torch.ops.aten.addmm.default), executed.count(attention)) == again


def test_names_copies_and_pickles_are_those_of_a_plain_model():
    model, x = stacked().eval(), torch.randn(10, 32)
    names, before = [*model.state_dict()], [dict(vars(block)) for block in model[0]]
    undo = checkpoint_activations(model, "selective")
    assert [*model.state_dict()] == names
    assert {type(block) for block in model[0]} == {nn.TransformerEncoderLayer}
    expected, twin = model(x), copy.deepcopy(model)
    for parameter in twin.requires_grad_(False).parameters():
        parameter.zero_()
    assert not twin(x).any(), "a copy has its own parameters"
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert torch.equal(loaded(x), expected)
    checkpoint_activations(loaded)()
    undo()
    undo()
    assert [dict(vars(block)) for block in model[0]] == before


@pytest.mark.frameworks
def test_a_transformer_trains_the_same_with_its_cache_left_on():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, **shape))
    ids = torch.randint(0, 31, (2, 9))

    def stepped(mode):
        undo = checkpoint_activations(model, mode) if mode else lambda: None
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        undo()
        return loss, [parameter.grad.clone() for parameter in model.parameters()]

    for mode in ("all", "selective"):
        assert_close(stepped(mode), stepped(None), rtol=0, atol=0)
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    with pytest.raises(ConfigError, match="itself already"):
        checkpoint_activations(model)
