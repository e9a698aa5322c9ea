"""compile_model and cudnn_benchmark: in place, checked beforehand, equal results."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from perfagent.errors import ConfigError
from perfagent_loop.compute.activation import checkpoint_activations
from perfagent_loop.compute.compiling import compile_model, uncompile_model
from perfagent_loop.compute.convolutions import cudnn_benchmark

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated",  # inductor's own imports
    # the compiler looks at it where blocks follow each other
    "ignore:The .grad attribute of a Tensor that is not a leaf",
)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.backends.cudnn.benchmark = False


def model():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))


def gradients(module, x):
    module.zero_grad()
    module(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


@pytest.mark.parametrize(
    ("blocks", "checkpointed", "graphs"),
    # the first block's input needs no gradient, that of the others does
    [(False, None, 1), (True, None, 2), (True, "every:2", 3), (True, "selective", 2)],
)
def test_a_compiled_model_keeps_its_names_and_gives_the_same(blocks, checkpointed, graphs):
    plain, x = model(), torch.randn(4, 8)
    compiled = copy.deepcopy(plain)
    if checkpointed:
        checkpoint_activations(compiled, checkpointed)
    compile_model(compiled, blocks=blocks, backend="aot_eager", fullgraph=True)
    assert type(compiled) is nn.Sequential
    assert [*compiled.state_dict()] == [*plain.state_dict()]
    torch._dynamo.utils.counters.clear()
    assert_close(gradients(compiled, x), gradients(plain, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    uncompile_model(compiled)
    assert all(part._compiled_call_impl is None for part in compiled.modules())
    assert torch.equal(compiled(x), plain(x))


def test_a_mode_for_gpus_says_so_on_a_cpu(caplog):
    compile_model(model(), "max-autotune")
    assert "mode 'max-autotune' compiles as 'default' on the cpu" in caplog.text


def test_a_missing_compiler_is_said_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"no compiler \(g\+\+\)"):
        compile_model(model())
    assert compile_model(model(), backend="aot_eager") is not None


def pictures():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))


@pytest.mark.parametrize(("make", "why"), [(model, "no convolutions"), (pictures, "2 convolutions are not on a GPU")])
def test_cudnn_searches_only_where_it_helps(make, why):
    torch.backends.cudnn.benchmark = True
    choice = cudnn_benchmark(make(), same_shapes=True)
    assert (choice.enabled, torch.backends.cudnn.benchmark, why in choice.why) == (False, False, True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cudnn_searches_for_convolutions_on_a_gpu():
    choice = cudnn_benchmark(pictures().cuda(), same_shapes=True)
    assert choice.enabled
    assert torch.backends.cudnn.benchmark is True
    assert "channels_last" in choice.change
    assert not cudnn_benchmark(pictures().cuda(), same_shapes=False).enabled
    assert cudnn_benchmark(pictures().cuda().to(memory_format=torch.channels_last), same_shapes=True).change == ""
