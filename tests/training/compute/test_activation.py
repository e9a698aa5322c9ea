"""Activation checkpointing: the same losses, gradients, state and random numbers, and less memory."""

from __future__ import annotations

import copy
import io
import random
import sys

import numpy as np
import pytest
import torch
from case_selection import everyday
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

import perfagent
from perfagent.errors import ConfigError
from perfagent.training.compute.activation import checkpoint_activations, dear_operators

MODES = ["all", "every:1", "every:2", "every:5", "selective"]


class Block(nn.Module):
    def __init__(self, width=32, heads=4, dropout=0.2):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.dropout = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(dropout)

    def forward(self, x, scale=1.0):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.out(y)) * scale
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self, blocks=4, block=Block):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(32, 7)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


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


def train(model, x, mode=None, *, steps=3, autocast=False):
    """(losses, gradients, state, random numbers afterwards) of a few steps."""
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = copy.deepcopy(model)
    if mode is not None:
        checkpoint_activations(model, mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
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


@pytest.mark.parametrize("mode", [*MODES, lambda name, module: name in ("layers.0", "layers.3")])
@pytest.mark.parametrize("autocast", everyday(1, [True, False]))
def test_training_is_the_same_bit_by_bit(mode, autocast):
    model, x = Model(), torch.randn(2, 10, 32)
    assert_equal(train(model, x, autocast=autocast), train(model, x, mode, autocast=autocast))


@pytest.mark.parametrize("mode", ["all", "selective"])
@pytest.mark.parametrize("block", [Normed, Chance])
def test_state_that_blocks_change_and_every_generator_move_once(mode, block):
    """torch's own checkpoint moves running statistics twice and draws other numbers from Python and numpy."""
    model, x = Model(3, block), torch.randn(16, 32)
    plain, checkpointed = train(model, x), train(model, x, mode)
    assert_equal(plain, checkpointed)
    if block is Normed:
        assert int(checkpointed[2]["layers.0.norm.num_batches_tracked"]) == 3


def test_what_torch_alone_would_do_to_running_statistics():
    """The reason for recomputing.py, so that it goes when torch does it."""
    model = Normed()
    torch.utils.checkpoint.checkpoint(model, torch.randn(16, 32), use_reentrant=False).sum().backward()
    assert int(model.norm.num_batches_tracked) == 2


def test_blocks_that_change_nothing_at_first_are_followed_when_they_do():
    def trained(mode):
        model, x = Model(2, Normed), torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
        model.load_state_dict(state)
        undo = checkpoint_activations(model, mode) if mode else None
        model.eval()
        model(x).backward()
        model.train()
        for _ in range(2):
            model(x).backward()
        assert undo is None or undo() is None
        return model.state_dict(), [parameter.grad for parameter in model.parameters()]

    state = Model(2, Normed).state_dict()
    one, other = trained(None), trained("all")
    assert all(torch.equal(one[0][name], other[0][name]) for name in one[0])
    assert all(torch.equal(mine, yours) for mine, yours in zip(one[1], other[1], strict=True))


def held_bytes(model, x):
    """Bytes that the graph of a forward pass holds on to, parameters and input left out."""
    own = {parameter.data_ptr() for parameter in model.parameters()} | {x.data_ptr()}
    held: dict[int, int] = {}
    living = []

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in own:
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        living.append(tensor.detach())  # with its graph it would be held for good: by the node that it is a part of
        return living[-1]

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x)
    del loss
    return sum(held.values())


def test_memory_falls_in_the_order_of_the_modes():
    model, x = Model(8), torch.randn(4, 64, 32)
    plain = held_bytes(model, x)
    held = {}
    for mode in ("all", "every:2", "every:4"):
        undo = checkpoint_activations(model, mode)
        held[mode] = held_bytes(model, x)
        undo()
    assert held_bytes(model, x) == plain
    assert held["all"] < 0.1 * plain
    assert held["every:2"] == pytest.approx((plain + held["all"]) / 2, rel=0.1)
    assert held["all"] < held["every:2"] < held["every:4"] < plain


def test_selective_computes_no_matrix_product_again():
    model, x = Model(), torch.randn(2, 10, 32)

    class Executed(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.names = []

        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    def products(mode):
        undo = checkpoint_activations(model, mode) if mode else None
        loss = model(x)
        with Executed() as executed:
            loss.backward()
        if undo:
            undo()
        attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
        return executed.names.count("aten.addmm.default"), executed.names.count(attention)

    assert products(None) == (0, 0)
    assert products("selective") == (0, 0)
    assert products("all") == (4 * 4, 4)


def test_what_is_kept_can_be_chosen():
    model, x = Model(), torch.randn(2, 10, 32)
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert attention in dear_operators()
    plain = train(model, x)
    chosen = copy.deepcopy(model)
    checkpoint_activations(chosen, "all", keep=[attention])
    assert_equal(plain, train(chosen, x))


def test_undo_leaves_nothing_behind():
    model = Model()
    names, before = [*model.state_dict()], [dict(vars(layer)) for layer in model.layers]
    undo = checkpoint_activations(model)
    assert [*model.state_dict()] == names
    assert all(type(layer) is Block for layer in model.layers)
    undo()
    undo()
    assert [dict(vars(layer)) for layer in model.layers] == before


def test_a_copy_computes_with_its_own_parameters_and_a_pickled_model_comes_back_plain():
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


def test_without_gradients_nothing_is_wrapped():
    model, x = Model().eval(), torch.randn(2, 10, 32)
    expected = model(x)
    checkpoint_activations(model)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


def test_arguments_by_name_and_several_results_pass_through():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, debug, context_fn=None):
            return self.linear(x) * debug, {"again": x * context_fn}

    model = nn.ModuleList([Pair(), Pair()])
    checkpoint_activations(model)
    x = torch.randn(2, 4, requires_grad=True)
    y, more = model[1](x, debug=2.0, context_fn=3.0)
    (y.sum() + more["again"].sum()).backward()
    assert x.grad.shape == x.shape
    assert model[1].linear.weight.grad is not None


# ---- beside others


def test_it_works_compiled_with_equal_results():
    """Compiled eagerly by aot_eager, which partitions as inductor does, without a C++ compiler's minute."""
    model, x = Model(2), torch.randn(2, 10, 32)
    model.layers.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, nn.Dropout) else None)
    plain = train(model, x)
    for mode in ("all", "selective"):
        torch._dynamo.reset()
        chosen = copy.deepcopy(model)
        checkpoint_activations(chosen, mode)
        chosen.compile(backend="aot_eager", fullgraph=True)
        compiled = train(chosen, x)
        assert compiled[0] == pytest.approx(plain[0], rel=1e-5)
        for name, gradient in plain[1].items():
            torch.testing.assert_close(compiled[1][name], gradient, rtol=1e-4, atol=1e-6)
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.long)])
def test_the_agent_counts_what_is_computed_again_apart(tmp_path, monkeypatch, backend):
    from perfagent.signals.flops.step_flops import own_operations
    from perfagent.signals.flops.step_recording import FlopCount
    from perfagent.step.state import state

    monkeypatch.setenv("PERFAGENT_RECORD", str(tmp_path))
    counted = {}
    for mode in (None, "all", "selective"):
        torch._dynamo.reset()
        model, x = Model(), torch.randn(2, 10, 32, requires_grad=True)
        model.layers.apply(lambda m: setattr(m, "p", 0.0) if isinstance(m, nn.Dropout) else None)
        if mode:
            checkpoint_activations(model, mode)
        if backend:
            model.compile(backend=backend)
        run = perfagent.attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        look = None
        for step in range(4):
            model(x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                look = FlopCount(state.current)
                assert look.at_boundary()
            elif step == 2:
                assert not look.at_boundary()
        run.finish()
        counted[mode] = own_operations(look, {}, model)
    torch._dynamo.reset()
    plain = counted[None]
    head = 2 * 20 * 32 * 7
    assert plain.total > 0
    assert plain.recomputed == 0
    for mode in ("all", "selective"):
        assert counted[mode].total == plain.total
    # the compiler leaves out what its backward pass does not need
    assert counted["all"].recomputed >= (0.8 if backend is None else 0.6) * (plain.total - 3 * head) / 3
    # asked for again, though the kept result is taken
    assert counted["selective"].recomputed <= counted["all"].recomputed


def test_a_transformer_of_hugging_face_trains_the_same_with_its_cache_left_on():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 31, (2, 9))
    losses, gradients = [], []
    for mode in (None, "all", "every:2", "selective"):
        undo = checkpoint_activations(model, mode) if mode else None
        model.zero_grad()
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
        losses.append(out.loss.item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        if undo:
            undo()
    assert len({*losses}) == 1
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))
    enable = (
        "activation_checkpointing_enable"
        if hasattr(model, "activation_checkpointing_enable")
        else "gradient_checkpointing_enable"
    )
    getattr(model, enable)()
    with pytest.raises(ConfigError, match="itself already"):
        checkpoint_activations(model)


# ---- misuse


@pytest.mark.parametrize(
    ("says", "mode", "options"),
    [
        ("mode must be", "some", {}),
        ("mode must be", "every:0", {}),
        ("mode must be", "every:x", {}),
        ("mode must be", None, {}),
        ("chose no module", lambda name, module: False, {}),
        ("lies inside", lambda name, module: name.startswith("layers.0"), {}),
        ("keep takes operators", "all", {"keep": [torch.ops.aten.mm]}),
    ],
)
def test_misuse_is_refused_with_a_sentence(says, mode, options):
    with pytest.raises(ConfigError, match=says):
        checkpoint_activations(Model(), mode, **options)


def test_what_has_no_blocks_or_has_them_already_is_refused():
    with pytest.raises(ConfigError, match="no list of like modules"):
        checkpoint_activations(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(ConfigError, match="torch module"):
        checkpoint_activations("resnet")
    model = Model()
    checkpoint_activations(model, "every:2")
    with pytest.raises(ConfigError, match="checkpointed already"):
        checkpoint_activations(model)
    compiled = Model()
    compiled.layers[0].compile(backend="aot_eager")
    with pytest.raises(ConfigError, match="before compile"):
        checkpoint_activations(compiled)


def test_a_kept_result_that_would_be_overwritten_is_refused():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)) for _ in range(2)))
    with pytest.raises(ConfigError, match=r"0\.1 changes its input in place"):
        checkpoint_activations(model, "selective")
    checkpoint_activations(model, "all")
    model(torch.randn(2, 4)).sum().backward()


def test_a_filled_cache_is_not_thrown_away_in_silence():
    class Filled:
        def get_seq_length(self):
            return 3

    class Cached(Block):
        def forward(self, x, past_key_values=None):
            assert past_key_values is None
            return super().forward(x)

    model = nn.ModuleList([Cached(), Cached()])
    checkpoint_activations(model)
    with pytest.raises(ConfigError, match="3 positions"):
        model[0](torch.randn(1, 2, 32), past_key_values=Filled())
    assert "transformers" not in vars(sys.modules["perfagent.training.compute.activation"])
