"""Names of parameters, and how many of them become one row of a heat map."""

from __future__ import annotations

import torch
from torch import nn

from perfagent.signals.gradients import Plan
from perfagent.signals.layers import MOST_LAYERS, Layers, names_of
from perfagent.wire import MAX_NAME_BYTES


def test_each_parameter_of_a_small_model_is_a_row():
    names = [f"blocks.{i}.{kind}" for i in range(10) for kind in ("weight", "bias")]
    layers = Layers(names)
    assert layers.names == tuple(names)
    assert layers.of == list(range(20))


def test_parameters_of_a_module_share_a_row_when_there_are_too_many():
    names = [f"blocks.{i}.{part}.{kind}" for i in range(64) for part in ("q", "k", "v") for kind in ("weight", "bias")]
    layers = Layers(names)
    assert len(layers.names) == 192
    assert layers.names[:3] == ("blocks.0.q", "blocks.0.k", "blocks.0.v")
    assert layers.of[:4] == [0, 0, 1, 1]


def test_deep_models_are_cut_where_few_enough_rows_are_left():
    names = [f"model.layers.{i}.mlp.experts.{e}.w{w}.weight" for i in range(48) for e in range(64) for w in (1, 2, 3)]
    layers = Layers([*names, "lm_head.weight"])
    assert len(layers.names) == 49
    assert layers.names[0] == "model.layers.0.mlp.experts"
    assert layers.names[-1] == "lm_head"


def test_a_flat_list_of_very_many_is_put_together_by_neighbors():
    layers = Layers([str(i) for i in range(10_000)])
    assert len(layers.names) <= MOST_LAYERS
    assert layers.of == sorted(layers.of)


def test_one_long_list_of_layers_is_not_one_row():
    blocks = [f"stages.{s}.{b}.{part}" for s in range(3) for b in range(200) for part in ("conv.weight", "norm.weight")]
    layers = Layers(["stem.weight", *blocks, "head.weight", "head.bias"])
    assert 150 < len(layers.names) <= MOST_LAYERS
    assert layers.of == sorted(layers.of)
    assert layers.names[:3] == ("stem", "stages.0.0", "stages.0.3")
    assert layers.names[-2:] == ("stages.2.198", "head")
    assert {layers.names[row] for row in layers.of[1:7]} == {"stages.0.0"}, "three blocks, each as a whole"
    parameters = Layers([f"experts.{i}" for i in range(300)])
    assert parameters.names[:2] == ("experts.0", "experts.2")
    assert parameters.of == [i // 2 for i in range(300)]


def test_wrappers_leave_no_trace_in_names(monkeypatch):
    import torch._dynamo.eval_frame as eval_frame

    monkeypatch.setattr(eval_frame, "cached_backends", {})  # others look there for whether anything was compiled
    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert names_of(optimizer, model) == ["0.weight", "0.bias"]
    compiled = torch.compile(model.module, backend="eager")
    assert names_of(optimizer, compiled) == ["0.weight", "0.bias"]


def test_a_part_of_the_model_that_is_called_as_wrappers_call_theirs_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model.register_parameter("weight", nn.Parameter(torch.ones(2)))
    told = ["weight", "module.weight", "module.bias", "head.weight", "head.bias"]
    assert names_of(torch.optim.SGD(model.parameters(), lr=0.1), model) == told
    assert names_of(torch.optim.SGD(model.named_parameters(), lr=0.1), None) == told
    assert names_of(torch.optim.SGD(model.parameters(), lr=0.1), nn.DataParallel(model)) == told


def test_the_optimizer_tells_names_where_no_model_is_known():
    model = nn.Linear(2, 2)
    assert names_of(torch.optim.SGD(model.named_parameters(), lr=0.1), None) == ["weight", "bias"]
    unnamed = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
    assert names_of(unnamed, None) == ["group0.0", "group1.0"]


def test_a_very_long_name_still_fits_on_the_wire():
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(100):
        model = nn.ModuleDict({"层层": model})
    for name in names_of(torch.optim.SGD(model.parameters(), lr=0.1), model):
        assert len(f"grad_square_sum/{name}".encode()) <= MAX_NAME_BYTES


def test_ranks_that_hold_other_parameters_of_a_model_have_the_same_rows():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(300)))
    parameters = list(model.parameters())
    whole = Layers([name for name, _ in model.named_parameters()])
    for mine in (slice(0, 200), slice(199, 600)):  # the 200th is held in part by each
        plan = Plan.of_pieces([(parameter, torch.ones(1)) for parameter in parameters[mine]], model)
        rows = [plan.layers.names[row] for row in plan.layers.of]
        assert rows == [whole.names[row] for row in whole.of[mine]]
