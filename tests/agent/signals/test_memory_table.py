from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_groups import alone_in_group
from quantized import InEightBits

from perfagent.hooks.new_progress import new_progress
from perfagent.signals.memory_table import MemoryTable, table
from perfagent.step.state import Progress
from perfagent.wire import CATALOGUE


class Sender:
    """What the table needs of a sender."""

    def __init__(self) -> None:
        self.rows: deque[Any] = deque()
        self.events: list[tuple[str, dict[str, Any], int | None]] = []

    def event(self, kind: str, data: dict[str, Any], *, step: int | None = None) -> None:
        self.events.append((kind, data, step))


def trained(steps: int = 1) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.Linear(20, 5, bias=False))
    groups = [
        {"params": model[0].parameters(), "name": "body", "lr": 0.1},
        {"params": model[1].parameters(), "lr": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(steps):
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


BODY, HEAD = 4 * (200 + 20), 4 * 100
COUNTERS = 3 * 4  # AdamW counts the steps of each parameter


def test_every_category_by_parameter_group() -> None:
    model, optimizer = trained()
    told = table(optimizer, model)
    assert told["parameters"] == BODY + HEAD
    assert told["gradients"] == BODY + HEAD  # cleared just now, and as large as that whenever they exist
    assert told["optimizer_state"] == 2 * (BODY + HEAD) + COUNTERS
    assert told["offloaded"] == 0
    body, head = told["groups"]
    assert (body["name"], body["lr"], body["numbers"], body["parameters"]) == ("body", 0.1, 220, BODY)
    assert (head["name"], head["lr"], head["optimizer_state"]) == ("1", 0.2, 2 * HEAD + 4)


def test_a_frozen_part_has_parameters_only_and_one_that_was_never_stepped_no_gradient() -> None:
    model, optimizer = trained()
    whole = torch.nn.ModuleList([model, torch.nn.Linear(3, 3, bias=False)])
    told = table(optimizer, whole)
    assert told["parameters"] == BODY + HEAD + 36
    assert told["gradients"] == BODY + HEAD
    optimizer.add_param_group({"params": whole[1].parameters()})
    assert table(optimizer, whole)["gradients"] == BODY + HEAD


def test_a_group_tells_the_numbers_that_it_trains_and_its_rate_however_that_is_given() -> None:
    frozen, trained = torch.nn.Linear(3, 2).requires_grad_(False), torch.nn.Linear(2, 1)
    groups = [
        {"params": [*frozen.parameters(), *trained.parameters()], "lr": 1},
        {"params": torch.nn.Linear(4, 1).parameters()},
    ]
    body, head = table(torch.optim.SGD(groups, lr=torch.tensor(0.5)))["groups"]
    assert (body["numbers"], body["lr"], body["parameters"]) == (3, 1.0, 4 * (8 + 3))
    assert (head["numbers"], head["lr"]) == (5, 0.5)


def test_an_optimizer_without_state_has_gradients_of_what_it_trains() -> None:
    layers = torch.nn.ModuleList(
        [torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(5, 5, bias=False).requires_grad_(False)]
    )
    told = table(torch.optim.SGD(layers.parameters(), lr=0.1))
    assert (told["parameters"], told["gradients"], told["optimizer_state"]) == (4 * (9 + 25), 4 * 9, 0)


class OnGpu(torch.nn.Parameter):
    """A parameter that says that it is on the second GPU."""

    device = torch.device("cuda:1")


def test_what_is_kept_on_the_host_counts_apart_whichever_parameter_comes_first() -> None:
    table_of_words, layer = torch.nn.Parameter(torch.zeros(8)), OnGpu(torch.zeros(100))
    optimizer = torch.optim.SGD([table_of_words, layer], lr=0.1, momentum=0.9)
    for parameter in (table_of_words, layer):
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros(parameter.numel())
    told = table(optimizer)
    assert (told["parameters"], told["gradients"], told["optimizer_state"]) == (400, 400, 0)
    assert told["offloaded"] == 2 * 32 + 32 + 400
    assert told["devices"] == [1]


def test_what_is_not_there_yet_does_not_count() -> None:
    model = torch.nn.ModuleList(
        [torch.nn.Linear(3, 3, device="meta"), torch.nn.LazyLinear(7), torch.nn.Linear(5, 5, bias=False)]
    )
    told = table(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert (told["parameters"], told["gradients"], told["offloaded"]) == (100, 100, 0)


def test_of_a_quantized_tensor_its_codes_and_scales_count() -> None:
    layer = torch.nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters())
    optimizer.state[layer.weight] = {
        "step": torch.zeros(()),
        "exp_avg": InEightBits(1024),
        "exp_avg_sq": InEightBits(1024),
    }
    assert table(optimizer)["optimizer_state"] == 4 + 2 * (1024 + 4 * 4)


def test_state_that_is_kept_by_name_once_more_counts() -> None:
    layer = torch.nn.Linear(10, 10, bias=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    statistics = {"left": torch.zeros(10, 10), "right": [torch.zeros(5), (torch.zeros(5),)], "every": 10}
    optimizer.state[layer.weight] = {"statistics": statistics, "momentum": torch.zeros(100)}
    statistics["itself"] = statistics
    assert table(optimizer)["optimizer_state"] == 400 + 20 + 20 + 400


def test_gradients_of_a_sparse_embedding_are_not_taken_for_its_size() -> None:
    model = torch.nn.ModuleDict(
        {"words": torch.nn.Embedding(1000, 16, sparse=True), "head": torch.nn.Linear(16, 2, bias=False)}
    )
    told = table(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert (told["parameters"], told["gradients"]) == (64_000 + 128, 128)


def test_the_part_of_this_rank_counts_of_a_sharded_tensor() -> None:
    class Sharded(torch.nn.Parameter):
        _local_tensor = torch.zeros(3, dtype=torch.bfloat16)

    assert table(torch.optim.SGD([Sharded(torch.zeros(12))], lr=0.1))["parameters"] == 6


def test_the_part_of_this_rank_counts_of_torchs_own_sharded_tensors() -> None:
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    with alone_in_group():
        mesh = init_device_mesh("cpu", (1,))
        layer = torch.nn.Linear(8, 8, bias=False)
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        layer.weight.sum().backward()
        optimizer.step()
        told = table(optimizer, layer)
    assert (told["parameters"], told["gradients"], told["optimizer_state"]) == (256, 256, 256)


def test_nothing_is_kept_alive() -> None:
    model, optimizer = trained()
    told = table(optimizer, model)
    parameter, gone = weakref.ref(model[0].weight), weakref.ref(model)  # type: ignore[index]
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert parameter() is None
    assert told["parameters"]


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
def test_looking_while_another_thread_trains_does_not_corrupt_its_memory() -> None:
    # torch's own reference counts are not safe for a gradient that backward is replacing: this died within a second
    done = subprocess.run(
        [sys.executable, "-c", WHILE_IT_TRAINS], capture_output=True, text=True, timeout=60.0, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 50


class Allocator:
    """Stands for torch.cuda: peak of each device, or no answer, as with another library's allocator."""

    def __init__(self, *peaks: int) -> None:
        self.peaks = peaks

    def is_initialized(self) -> bool:
        return True

    def memory_stats_as_nested_dict(self, device: int) -> dict[str, Any]:
        if not self.peaks:
            raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats.")
        return {"allocated_bytes": {"all": {"current": 0, "peak": self.peaks[device]}}}


@pytest.mark.parametrize(
    ("peaks", "rest"),
    [((9_000, 1_000), 200), ((9_000, 799), None), ((), None)],
    ids=["of the device that it is on", "the script began a new peak", "another allocator"],
)
def test_activations_are_what_is_left_of_the_peak(polled: Any, monkeypatch: Any, peaks: Any, rest: int | None) -> None:
    monkeypatch.setattr(torch, "cuda", Allocator(*peaks))
    layer = OnGpu(torch.zeros(100))
    optimizer = torch.optim.SGD([layer], lr=0.1)
    made, sender, progress, _ = polled(None, optimizer, device=0)
    progress.completed = 2
    made.poll()
    _, _, _, names, values = sender.rows[0]
    told = dict(zip(names, values, strict=True))
    assert told["memory/gradients_bytes"] == 400.0
    assert told.get("memory/activations_and_other_bytes") == rest


@pytest.fixture
def polled() -> Callable[..., tuple[MemoryTable, Sender, Progress, list[float]]]:
    def make(
        model: Any, optimizer: Any, device: int | None = None
    ) -> tuple[MemoryTable, Sender, Progress, list[float]]:
        from perfagent.governor import Governor
        from perfagent.hooks.optimizer_step import make_primary

        sender, now = Sender(), [100.0]
        progress = new_progress(sender.rows, Governor(0.5))
        make_primary(progress, optimizer)
        made = MemoryTable(sender, progress, lambda: model, lambda: device, clock=lambda: now[0])  # type: ignore[arg-type]
        return made, sender, progress, now

    return make


def test_rows_come_once_a_minute_and_the_event_only_with_news(polled: Any) -> None:
    model, optimizer = trained()
    made, sender, progress, now = polled(model, optimizer)
    made.poll()
    assert not sender.rows  # nothing is known before the second step
    progress.completed = 2
    for _ in range(6):
        made.poll()
        now[0] += 30.0
    assert len(sender.rows) == 3
    step, _, _, names, values = sender.rows[0]
    assert step == 2
    assert dict(zip(names, values, strict=True)) == {
        "memory/parameters_bytes": BODY + HEAD,
        "memory/gradients_bytes": BODY + HEAD,
        "memory/optimizer_state_bytes": 2 * (BODY + HEAD) + COUNTERS,
    }
    assert set(names) <= CATALOGUE.keys()
    assert [kind for kind, _, _ in sender.events] == ["memory"]
    optimizer.add_param_group({"params": torch.nn.Linear(50, 50).parameters()})
    made.poll()
    assert len(sender.events) == 2
    assert len(sender.events[1][1]["groups"]) == 3


def test_a_run_tells_its_table(record: Any) -> None:
    recorded = record()
    model, optimizer = trained(0)
    for _ in range(3):
        model(torch.ones(2, 10)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    (poll,) = [source for source in recorded.sender.sources if source.__qualname__ == "MemoryTable.poll"]
    poll()
    ((_, told, _),) = [event for event in recorded.sender.events if event[0] == "memory"]
    assert told["parameters"] == BODY + HEAD
    assert "activations_and_other" not in told  # no allocator to ask on the CPU


def test_what_was_frozen_after_it_was_trained_keeps_its_state_and_has_no_gradient() -> None:
    model, optimizer = trained()
    model[0].requires_grad_(False)
    told = table(optimizer, model)
    assert told["gradients"] == HEAD
    assert told["optimizer_state"] == 2 * (BODY + HEAD) + COUNTERS


def test_the_state_of_other_optimizers_counts_and_each_gradient_once() -> None:
    model, optimizer = trained()
    second = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 10)).sum().backward()
    second.step()
    told = table(optimizer, model, [second])
    assert told["parameters"] == told["gradients"] == BODY + HEAD
    assert told["optimizer_state"] == 2 * (BODY + HEAD) + COUNTERS + BODY
    assert len(told["groups"]) == 3


def test_tensors_in_lists_of_an_optimizers_state_count() -> None:
    layer = torch.nn.Linear(10, 10)
    optimizer = torch.optim.LBFGS(layer.parameters(), history_size=5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(torch.ones(2, 10)).square().mean()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]
    values = [
        one
        for value in optimizer.state[layer.weight].values()
        for one in (value if isinstance(value, list) else [value])
    ]
    told = table(optimizer, layer)
    tensors = {id(one): one for one in values if isinstance(one, torch.Tensor)}
    assert told["optimizer_state"] == sum(one.numel() * one.element_size() for one in tensors.values())
    assert told["gradients"] == 4 * 110
