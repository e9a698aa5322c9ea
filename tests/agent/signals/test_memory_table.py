"""The memory of parameters, gradients and optimizer states, and what is left of the peak."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from process_groups import alone_in_group
from quantized import InEightBits
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from perfagent.hooks.optimizer_step import make_primary
from perfagent.signals.memory_table import MemoryTable, table
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


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, **options)


def sizes(told):
    return tuple(told[column] for column in ("parameters", "gradients", "optimizer_state", "offloaded"))


def test_every_category_is_told_by_parameter_group(trained):
    model, optimizer = trained
    told = table(optimizer, model)
    # gradients were cleared just now, and are as large as that whenever they exist
    assert sizes(told) == (BODY + HEAD, BODY + HEAD, STATE, 0)
    body, head = told["groups"]
    assert (body["name"], body["lr"], body["numbers"], body["parameters"]) == ("body", 0.1, 220, BODY)
    assert (head["name"], head["lr"], head["optimizer_state"]) == ("1", 0.2, 2 * HEAD + 4)


def test_a_part_without_an_optimizer_has_parameters_only(trained):
    model, optimizer = trained
    whole = nn.ModuleList([model, nn.Linear(3, 3, bias=False)])
    assert sizes(table(optimizer, whole)) == (BODY + HEAD + 36, BODY + HEAD, STATE, 0)
    optimizer.add_param_group({"params": whole[1].parameters()})
    assert sizes(table(optimizer, whole)) == (BODY + HEAD + 36, BODY + HEAD, STATE, 0), "it was never stepped"


def test_what_is_frozen_later_keeps_its_state_and_has_no_gradient(trained):
    model, optimizer = trained
    model[0].requires_grad_(False)
    assert sizes(table(optimizer, model)) == (BODY + HEAD, HEAD, STATE, 0)


def test_the_state_of_other_optimizers_counts_and_each_gradient_once(trained):
    model, optimizer = trained
    second = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    train(model, second)
    told = table(optimizer, model, [second])
    assert sizes(told) == (BODY + HEAD, BODY + HEAD, STATE + BODY, 0)
    assert len(told["groups"]) == 3


def test_a_group_tells_what_it_trains_and_its_rate():
    frozen, trains = nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1)
    groups = [
        {"params": [*frozen.parameters(), *trains.parameters()], "lr": 1},
        {"params": nn.Linear(4, 1).parameters()},
    ]
    body, head = table(torch.optim.SGD(groups, lr=torch.tensor(0.5)))["groups"]
    assert (body["numbers"], body["lr"], body["parameters"]) == (3, 1.0, 4 * (8 + 3))
    assert (head["numbers"], head["lr"]) == (5, 0.5)


class OnGpu(nn.Parameter):
    """A parameter that says that it is on the second GPU."""

    device = torch.device("cuda:1")


def on_the_host_and_a_gpu():
    words, layer = nn.Parameter(torch.zeros(8)), OnGpu(torch.zeros(100))
    optimizer = torch.optim.SGD([words, layer], lr=0.1, momentum=0.9)
    for parameter in (words, layer):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(parameter.numel())
    return optimizer, None


def not_there_yet():
    model = nn.ModuleList([nn.Linear(3, 3, device="meta"), nn.LazyLinear(7), nn.Linear(5, 5, bias=False)])
    return sgd(model), model


def without_state():
    model = nn.ModuleList([nn.Linear(3, 3, bias=False), nn.Linear(5, 5, bias=False).requires_grad_(False)])
    return sgd(model), model


def sparse_embedding():
    model = nn.ModuleList([nn.Embedding(1000, 16, sparse=True), nn.Linear(16, 2, bias=False)])
    return sgd(model), model


def with_state(**state):
    layer = nn.Linear(32, 32, bias=False)
    optimizer = sgd(layer)
    optimizer.state[layer.weight] = state
    return optimizer, layer


def quantized():
    """Of a quantized tensor its codes and scales count."""
    return with_state(step=torch.zeros(()), exp_avg=InEightBits(1024), exp_avg_sq=InEightBits(1024))


def nested():
    """State that is kept by name once more, in lists and in itself."""
    statistics = {"left": torch.zeros(10, 10), "right": [torch.zeros(5), (torch.zeros(5),)], "every": 10}
    statistics["itself"] = statistics
    return with_state(statistics=statistics, momentum=torch.zeros(100))


def of_this_rank():
    class Sharded(nn.Parameter):
        _local_tensor = torch.zeros(3, dtype=torch.bfloat16)

    return torch.optim.SGD([Sharded(torch.zeros(12))], lr=0.1), None


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (on_the_host_and_a_gpu, (400, 400, 0, 2 * 32 + 32 + 400)),  # whichever parameter comes first
        (not_there_yet, (100, 100, 0, 0)),
        (without_state, (4 * (9 + 25), 4 * 9, 0, 0)),
        (sparse_embedding, (64_000 + 128, 128, 0, 0)),  # its gradients are not as large as the table
        (quantized, (4096, 4096, 4 + 2 * (1024 + 4 * 4), 0)),
        (nested, (4096, 4096, 400 + 20 + 20 + 400, 0)),
        (of_this_rank, (6, 6, 0, 0)),
    ],
)
def test_tensors_of_special_kinds_count_what_they_take(make, expected):
    optimizer, model = make()
    assert sizes(table(optimizer, model)) == expected


def test_the_part_of_this_rank_counts_of_torchs_sharded_tensors():
    with alone_in_group():
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, init_device_mesh("cpu", (1,)), [Shard(0)]))
        optimizer = sgd(layer, momentum=0.9)
        layer.weight.sum().backward()
        optimizer.step()
        assert sizes(table(optimizer, layer)) == (256, 256, 256, 0)


def test_tensors_in_lists_of_an_optimizers_state_count():
    layer = nn.Linear(10, 10)
    optimizer = torch.optim.LBFGS(layer.parameters(), history_size=5)

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 10)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    state = [
        one for value in optimizer.state[layer.weight].values() for one in (value if type(value) is list else [value])
    ]
    tensors = {id(one): one.numel() * one.element_size() for one in state if isinstance(one, torch.Tensor)}
    assert sizes(table(optimizer, layer)) == (440, 440, sum(tensors.values()), 0)


def test_nothing_is_kept_alive(trained):
    model, optimizer = of_two_groups()
    assert table(optimizer, model)["parameters"]
    gone = [weakref.ref(model), weakref.ref(model[0].weight)]
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None, None]


WHILE_IT_TRAINS = """
import threading, time
import torch
from perfagent.signals.memory_table import table

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
x, over = torch.randn(32, 256), threading.Event()

def look():
    while not over.is_set():
        table(optimizer, model)
        time.sleep(0)

thread = threading.Thread(target=look)
thread.start()
until, steps = time.monotonic() + 4.0, 0
while time.monotonic() < until:
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    steps += 1
over.set()
thread.join()
print(steps)
"""


@pytest.mark.long
@pytest.mark.real
def test_looking_while_another_thread_trains_corrupts_nothing():
    # torch's own reference counts are not safe for a gradient that backward is replacing: this died within a second
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IT_TRAINS], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50


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
    make_primary(recorded.progress, optimizer)
    recorded.progress.completed = 2
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cuda", allocator(*peaks))
        MemoryTable(recorded.sender, recorded.progress, lambda: None, lambda: 0).poll()
    ((_, told),) = recorded.sender.drain()
    assert told["memory/gradients_bytes"] == 400.0
    assert told.get("memory/activations_and_other_bytes") == rest


def test_rows_come_once_a_minute_and_the_event_only_with_news(record):
    recorded, now = record(), [100.0]
    model, optimizer = of_two_groups()
    made = MemoryTable(recorded.sender, recorded.progress, lambda: model, lambda: None, clock=lambda: now[0])
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


def test_a_run_tells_its_table(record):
    recorded = record()
    model, optimizer = of_two_groups()
    train(model, optimizer, steps=3)
    recorded.tick()
    (told,) = recorded.events("memory")
    assert told["parameters"] == BODY + HEAD
    assert "activations_and_other" not in told, "no allocator to ask on the CPU"
