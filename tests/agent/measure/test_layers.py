"""Names of parameters, and how many of them become one row of a heat map."""

from __future__ import annotations

import copy

import torch
from torch import nn

from perfagent.decode.layers import MOST_LAYERS, Layers, layers_of
from perfagent.measure.gradients import Plan
from perfagent.measure.parameter_names import names_of
from perfagent.step.gradients import ParameterTable
from perfagent.wire import MAX_NAME_BYTES

KINDS = ("weight", "bias")


def grouped(names) -> Layers:
    return layers_of(ParameterTable(names=names, sizes=[1] * len(names)))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_too_many_parameters_share_the_row_of_their_module():
    layers = grouped([f"blocks.{i}.{part}.{kind}" for i in range(64) for part in ("q", "k", "v") for kind in KINDS])
    assert len(layers.names) == 192
    assert layers.names[:3] == ("blocks.0.q", "blocks.0.k", "blocks.0.v")
    assert layers.of[:4] == [0, 0, 1, 1]


def test_deep_models_are_cut_where_few_enough_rows_are_left():
    names = [f"layers.{i}.experts.{e}.w{w}.weight" for i in range(48) for e in range(64) for w in (1, 2, 3)]
    layers = grouped([*names, "lm_head.weight"])
    assert (len(layers.names), layers.names[0], layers.names[-1]) == (49, "layers.0.experts", "lm_head")


def test_one_long_list_of_layers_shares_rows_among_neighbors():
    blocks = [f"stages.{s}.{b}.{part}" for s in range(3) for b in range(200) for part in ("conv.weight", "norm.weight")]
    layers = grouped(["stem.weight", *blocks, "head.weight", "head.bias"])
    assert 150 < len(layers.names) <= MOST_LAYERS
    assert layers.of == sorted(layers.of)
    assert layers.names[:3] == ("stem", "stages.0.0", "stages.0.3")
    assert layers.names[-2:] == ("stages.2.198", "head")
    assert {layers.names[row] for row in layers.of[1:7]} == {"stages.0.0"}, "three blocks, each as a whole"
    parameters = grouped([f"experts.{i}" for i in range(300)])
    assert parameters.names[:2] == ("experts.0", "experts.2")
    assert parameters.of == [i // 2 for i in range(300)]


def test_part_called_like_a_wrapped_module_keeps_its_name():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    model.register_parameter("weight", nn.Parameter(torch.ones(2)))
    told = ["weight", "module.weight", "module.bias", "head.weight", "head.bias"]
    assert names_of(sgd(model), model) == names_of(sgd(model), nn.DataParallel(model)) == told
    assert names_of(torch.optim.SGD(model.named_parameters(), lr=0.1), None) == told, "the optimizer knows them, too"


def test_a_very_long_name_still_fits_on_the_wire():
    model: nn.Module = nn.Linear(1, 1)
    for _ in range(100):
        model = nn.ModuleDict({"层层": model})
    names = names_of(sgd(both := nn.ModuleDict({"one": model, "other": copy.deepcopy(model)})), both)
    assert len({*names}) == len(names) == 4
    for name in names:
        assert len(f"grad_square_sum/{name}".encode()) <= MAX_NAME_BYTES


def test_ranks_with_other_parameters_have_the_same_rows():
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(300)))
    parameters = list(model.parameters())
    whole = grouped([name for name, _ in model.named_parameters()])
    for mine in (slice(0, 200), slice(199, 600)):  # the 200th is held in part by each
        plan = Plan.of_pieces([(parameter, torch.ones(1)) for parameter in parameters[mine]], model)
        layers = layers_of(plan)
        assert [layers.names[row] for row in layers.of] == [whole.names[row] for row in whole.of[mine]]
