"""Activation checkpointing: the same losses, gradients, state and random numbers, and less memory."""

from __future__ import annotations

import copy
import io
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from perfagent.errors import ConfigError
from perfagent_loop.compute.activation import checkpoint_activations


class Block(nn.Module):
    def __init__(self, width=32, heads=4, dropout=0.2):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(y))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, blocks=4, block=Block):
        super().__init__()
        self.layers, self.head = nn.Sequential(*(block() for _ in range(blocks))), nn.Linear(32, 7)

    def forward(self, x):
        return self.head(self.layers(x)).square().mean()


class Normed(nn.Module):
    """Changes buffers as it runs: running statistics, a count, the vectors of spectral norm."""

    def __init__(self):
        super().__init__()
        self.one = nn.utils.parametrizations.spectral_norm(nn.Linear(32, 32))
        self.norm, self.two = nn.BatchNorm1d(32), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.two(torch.relu(self.norm(self.one(x))))


class Chance(nn.Module):
    """Draws from every generator there is."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x):
        x = x * (1.0 + random.random())
        x = x * float(np.random.rand() + 1.0)
        return torch.relu(self.linear(x)) * torch.rand(32)


def train(model, x, mode=None, *, autocast=False):
    """(losses, gradients, state, random numbers afterwards) of a few steps."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = copy.deepcopy(model)
    if mode is not None:
        checkpoint_activations(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    model.eval()
    model(x).backward()  # blocks that change nothing here change their buffers later
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return losses, gradients, model.state_dict(), (torch.rand(3).tolist(), random.random(), np.random.rand())


def assert_equal(one, other):
    assert one[0] == other[0]
    for mine, yours in zip(one[1:3], other[1:3], strict=True):
        assert mine.keys() == yours.keys()
        assert all(torch.equal(mine[name], yours[name]) for name in mine)
    assert one[3] == other[3]


@pytest.mark.parametrize(
    "mode", ["all", "every:2", "every:5", "selective", lambda name, module: name in ("layers.0", "layers.3")]
)
def test_training_is_the_same_bit_by_bit(mode):
    model, x = Model(), torch.randn(2, 10, 32)
    assert_equal(train(model, x, autocast=True), train(model, x, mode, autocast=True))


@pytest.mark.parametrize("mode", ["all", "selective"])
@pytest.mark.parametrize("block", [Normed, Chance])
def test_state_of_blocks_and_generators_moves_once(mode, block):
    """torch's own checkpoint moves running statistics twice and draws other numbers from Python and numpy."""
    model, x = Model(3, block), torch.randn(16, 32)
    plain, checkpointed = train(model, x), train(model, x, mode)
    assert_equal(plain, checkpointed)
    if block is Normed:
        assert int(checkpointed[2]["layers.0.norm.num_batches_tracked"]) == 3


def test_selective_computes_no_product_again_and_all_does():
    model, x = Model(), torch.randn(2, 10, 32)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

    class Executed(TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            executed.append(func)
            return func(*args, **(kwargs or {}))

    for mode, keep, again in (
        ("selective", None, (0, 0)), ("every:2", None, (8, 2)), ("all", None, (16, 4)), ("all", [attention], (16, 0)),
    ):  # fmt: skip
        executed = []
        undo = checkpoint_activations(model, mode, **({"keep": keep} if keep else {}))
        loss = model(x)
        with Executed():
            loss.backward()
        undo()
        assert (executed.count(torch.ops.aten.addmm.default), executed.count(attention)) == again


def test_undo_leaves_nothing_behind():
    model = Model()
    names, before = [*model.state_dict()], [dict(vars(layer)) for layer in model.layers]
    undo = checkpoint_activations(model)
    assert [*model.state_dict()] == names
    assert all(type(layer) is Block for layer in model.layers)
    undo()
    undo()
    assert [dict(vars(layer)) for layer in model.layers] == before


def test_copies_have_their_own_parameters_and_pickles_are_plain():
    model, x = Model(), torch.randn(2, 10, 32)
    checkpoint_activations(model, "selective")
    model.eval()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(x).item() == 0.0
    assert model(x).item() > 0.0
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert loaded(x).item() == model(x).item()
    checkpoint_activations(loaded)()


@pytest.mark.frameworks
def test_a_transformer_trains_the_same_with_its_cache_left_on():
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, **shape))
    ids = torch.randint(0, 31, (2, 9))
    losses, gradients = set(), []
    for mode in (None, "all", "selective"):
        undo = checkpoint_activations(model, mode) if mode else lambda: None
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        losses.add(out.loss.item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        undo()
    assert len(losses) == 1
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    with pytest.raises(ConfigError, match="itself already"):
        checkpoint_activations(model)
