"""The memory of parameters, gradients and optimizer states, and what is left of the peak."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from perfagent.probes.memory_table import MemoryTable, table
from perfagent.wire import CATALOGUE


def train(model, optimizer, steps=1):
    for _ in range(steps):
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def of_two_groups():
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5, bias=False))
    groups = [
        {"params": model[0].parameters(), "name": "body", "lr": 0.1},
        {"params": model[1].parameters(), "lr": 0.2},
    ]
    return model, torch.optim.AdamW(groups)


@pytest.fixture
def trained():
    model, optimizer = of_two_groups()
    train(model, optimizer)
    return model, optimizer


BODY, HEAD = 4 * (200 + 20), 4 * 100
STATE = 2 * (BODY + HEAD) + 3 * 4  # AdamW counts the steps of each parameter


def sizes(told):
    return tuple(told[column] for column in ("parameters", "gradients", "optimizer_state", "offloaded"))


def test_every_category_is_told_by_parameter_group(trained):
    model, optimizer = trained
    told = table([optimizer], model)
    # gradients were cleared just now, and are as large as that whenever they exist
    assert sizes(told) == (BODY + HEAD, BODY + HEAD, STATE, 0)
    body, head = told["groups"]
    assert (body["name"], body["lr"], body["numbers"], body["parameters"]) == ("body", 0.1, 220, BODY)
    assert (head["name"], head["lr"], head["optimizer_state"]) == ("1", 0.2, 2 * HEAD + 4)


class Untouchable(nn.Parameter):
    @property
    def grad(self):
        raise AssertionError("its gradient was asked for")


def test_a_group_tells_what_it_trains_and_its_rate():
    """torch's own reference counts are not safe for a gradient that backward is replacing on another thread: a training died
    of it within a second."""
    frozen, trains = nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)
    trains.weight = Untouchable(torch.zeros(1, 2))
    groups = [
        {"params": [*frozen.parameters(), *trains.parameters()], "lr": 1},
        {"params": nn.Linear(4, 1).parameters()},
    ]
    body, head = table([torch.optim.SGD(groups, lr=torch.tensor(0.5))])["groups"]
    assert (body["numbers"], body["lr"], body["parameters"]) == (3, 1.0, 4 * (8 + 3))
    assert (head["numbers"], head["lr"]) == (5, 0.5)


class OnGpu(nn.Parameter):
    """A parameter that says that it is on the second GPU."""

    device = torch.device("cuda:1")


def test_what_is_on_the_host_beside_a_gpu_is_offloaded():
    """Whichever parameter comes first."""
    words, layer = nn.Parameter(torch.zeros(8)), OnGpu(torch.zeros(100))
    optimizer = torch.optim.SGD([words, layer], lr=0.1, momentum=0.9)
    for parameter in (words, layer):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(parameter.numel())
    assert sizes(table([optimizer])) == (400, 400, 0, 2 * 32 + 32 + 400)


# ---- rows and events of a run


def allocator(*peaks):
    """Stands for torch.cuda: peak of each device, or no answer, as with another library's allocator."""

    def stats(device):
        if not peaks:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        return {"allocated_bytes": {"all": {"current": 0, "peak": peaks[device]}}}

    return SimpleNamespace(is_initialized=lambda: True, memory_stats_as_nested_dict=stats)


@pytest.mark.parametrize(
    ("peaks", "rest"),
    [((9_000, 1_000), 200), ((9_000, 800), 0), ((9_000, 799), None), ((), None)],
    ids=["of its own device", "nothing else", "the script began a new peak", "another allocator"],
)
def test_activations_are_what_is_left_of_the_peak(record, monkeypatch, peaks, rest):
    recorded = record()
    optimizer = torch.optim.SGD([OnGpu(torch.zeros(100))], lr=0.1)
    recorded.progress.selection.make_primary(optimizer)
    recorded.progress.completed = 2
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cuda", allocator(*peaks))
        MemoryTable(recorded.sender, recorded.progress, lambda: None).poll()
    ((_, told),) = recorded.sender.drain()
    assert told["memory/gradients_bytes"] == 400.0
    assert told.get("memory/activations_and_other_bytes") == rest


def test_rows_come_once_a_minute_and_the_event_only_with_news(record):
    recorded, now = record(), [100.0]
    model, optimizer = of_two_groups()
    made = MemoryTable(recorded.sender, recorded.progress, lambda: model, clock=lambda: now[0])
    train(model, optimizer)
    made.poll()
    assert recorded.events("memory") == [], "nothing is known before the second step"
    train(model, optimizer)
    for _ in range(6):
        made.poll()
        now[0] += 30.0
    assert len(recorded.events("memory")) == 1
    optimizer.add_param_group({"params": nn.Linear(50, 50).parameters()})
    made.poll()
    assert [len(told["groups"]) for told in recorded.events("memory")] == [2, 3]
    names = ("memory/parameters_bytes", "memory/gradients_bytes", "memory/optimizer_state_bytes")
    recorded.finish()
    rows = [(step, values) for step, values in recorded.rows if names[0] in values]
    assert [step for step, _ in rows] == [2] * 4
    assert rows[0][1] == dict(zip(names, (BODY + HEAD, BODY + HEAD, STATE), strict=True))
    assert set(names) <= CATALOGUE.keys()
