"""The agent on two devices that hold back, run out of memory, capture graphs and get lost (fake_accelerator)."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_step import counted_step
from fake_accelerator import Control
from torch import nn

from perfagent.delivery.columns import Columns
from perfagent.delivery.drain import Collector
from perfagent.delivery.row_packing import rows_in
from perfagent.device import DeviceClock, duplicate, fetched, is_captured, reached, readings
from perfagent.media.snapshot import Snapshot

MIB = 2**20


def trained(model: nn.Module, steps: int, x: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def in_a_thread(act: Callable[[], Any]) -> int:
    """The native id of a thread that has done it."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()
    return thread.native_id or 0


def newest(recorded: Any, name: str) -> float | None:
    recorded.poll()
    recorded.tick()
    return next((values[name] for _, values in reversed(recorded.rows) if name in values), None)


@pytest.mark.parametrize("how", ["model", "current", "memory"])
def test_a_ranks_device_is_known_before_its_first_step(fakegpu: Control, record: Any, how: str) -> None:
    model = nn.Linear(MIB // 4, 1, bias=False).to("fakegpu:1")
    elsewhere = torch.zeros(MIB, device="fakegpu:0") if how != "memory" else None
    if how == "current":
        torch.accelerator.set_device_index(1)
    recorded = record(model if how == "model" else None)
    assert newest(recorded, "cuda/allocated_bytes") == torch.accelerator.memory_allocated(1) == MIB
    assert elsewhere is None or elsewhere.numel()


def test_no_capture_of_the_script_ends_by_a_query(fakegpu: Control, record: Any) -> None:
    recorded, x = record(), torch.ones(2, 4, device="fakegpu:0")
    model = nn.Linear(4, 1).to("fakegpu:0")
    with fakegpu.held():
        trained(model, 3, x)
    graph = torch.accelerator.Graph()
    with torch.fakegpu.Stream(), graph:
        sender = in_a_thread(recorded.tick)
        result = x * 2
    graph.replay()
    assert result.sum().item() == 16.0
    assert sender not in fakegpu.by_thread(), "it asked the devices something"
    assert [step for step, _ in recorded.steps()] == [1, 2, 3]


def test_no_capture_of_the_script_ends_by_a_fetch(fakegpu: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Snapshot(torch.ones(2, device="fakegpu:0"))
    fetches: list[Any] = []

    def fetch() -> None:
        with pytest.raises(TimeoutError):
            fetches.append(image.array())

    graph = torch.accelerator.Graph()
    with torch.fakegpu.Stream(), graph, monkeypatch.context() as patched:
        patched.setattr(readings, "FETCH_S", 0.0)
        assert not image.ready()
        sender = in_a_thread(fetch)
    assert sender not in fakegpu.by_thread() and not fetches
    assert image.ready() and image.array().tolist() == [1.0, 1.0]


def test_large_copies_wait_for_the_device_and_nobody_for_them(fakegpu: Control) -> None:
    x = torch.arange(6.0, device="fakegpu:1")
    fakegpu.hold(1)
    copy, copied = duplicate(x)
    x += 10  # behind it in the stream
    assert not reached(copied)
    fakegpu.let_go(1)
    assert reached(copied)
    fakegpu.hold(1)
    threading.Timer(0.01, lambda: fakegpu.let_go(1)).start()
    assert fetched(copy).tolist() == [0, 1, 2, 3, 4, 5]
    with torch.fakegpu.Stream("fakegpu:1"), torch.accelerator.Graph():
        assert is_captured(x)


def test_a_log_that_waits_for_its_device_holds_up_no_step(fakegpu: Control, record: Any) -> None:
    recorded, model = record(), nn.Linear(4, 1).to("fakegpu:0")
    trained(model, 1, torch.ones(2, 4, device="fakegpu:0"))
    sender = recorded.sender
    sender.counters = Counter()
    collector = Collector(sender, Columns())

    def collected() -> set[tuple[int, str]]:
        blocks = collector.collect(0.0, last=False)
        return {(step, name) for block in blocks for step, _, _, values in rows_in(block) for name in dict(values)}

    with fakegpu.held(1):
        recorded.run.log({"side/x": torch.ones((), device="fakegpu:1")})
        trained(model, 3, torch.ones(2, 4, device="fakegpu:0"))
        found = collected()
    assert {(1, "lr"), (2, "lr"), (3, "lr")} <= found
    assert "side/x" in {name for _, name in collected() - found}


def test_a_step_takes_the_time_of_the_device(fakegpu: Control, record: Any) -> None:
    """The host launches three steps in no time, and would wait in the fourth."""
    model = nn.Linear(4, 1).to("fakegpu:0")
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(2, 4, device="fakegpu:0")
    recorded = record(model)
    for step in range(8):
        fakegpu.set_clock(10.0 + 0.5 * step)
        trained(model, 1, x, optimizer)
    times = recorded.series("step_time_s")
    assert [*times] == [2, 3, 4, 5, 6, 7, 8]
    assert [times[step] for step in range(3, 9)] == pytest.approx([0.5] * 6, rel=0.02), "but for what the agent did"
    assert recorded.series("samples_per_s").get(8) == pytest.approx(4.0, rel=0.02)


class Busy(torch.autograd.Function):
    """Keeps the stream that its backward pass is on busy for a second."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fakegpu: Control) -> torch.Tensor:
        ctx.fakegpu = fakegpu
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.fakegpu.work(1.0, torch.accelerator.current_stream(gradient.device))
        return gradient, None


class Split(nn.Module):
    """Layers on two devices."""

    def __init__(self, fakegpu: Control) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4).to("fakegpu:0"), nn.Linear(4, 1).to("fakegpu:1")
        self.fakegpu = fakegpu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Busy.apply(self.first(x), self.fakegpu).to("fakegpu:1"))


def test_a_phase_lasts_until_all_devices_of_a_model_are_done(fakegpu: Control, record: Any) -> None:
    fakegpu.set_clock(100.0)
    model = Split(fakegpu)
    recorded = record(model)
    trained(model, 5, torch.ones(2, 4, device="fakegpu:0"))
    phases = recorded.series("phase/backward_s")
    assert [round(phases[step], 3) for step in (3, 4, 5)] == [1.0, 1.0, 1.0]


def test_a_second_training_on_another_device_has_its_phases(fakegpu: Control, record: Any) -> None:
    fakegpu.set_clock(100.0)
    recorded = record()
    for index, width in enumerate((4, 64)):
        inner = nn.Linear(width, 1).to(f"fakegpu:{index}")
        model = nn.Sequential(inner, nn.Identity())
        model[1].forward = lambda x: Busy.apply(x, fakegpu)
        trained(model, 20, torch.ones(2, width, device=f"fakegpu:{index}"))
        del model, inner
    assert [round(value, 3) for _, value in recorded.of("phase/backward_s")][-8:] == [1.0] * 8


def test_a_step_has_as_many_operations_as_on_the_cpu(fakegpu: Control, record: Any) -> None:
    """Its backward pass runs on a thread of the device's."""
    counted = []
    for device in ("cpu", "fakegpu:1"):
        model, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(100))).to(device), torch.ones(4, 16, device=device)
        recorded = record(model)
        counted.append(counted_step(model, lambda model, x=x: model(x).square().mean()).total)
        recorded.finish()
    assert counted == [2 * 4 * 16 * 16 * (3 * 100 - 1)] * 2


def test_a_device_out_of_memory_is_named_with_its_allocator(fakegpu: Control, record: Any) -> None:
    fakegpu.set_memory(64 * MIB, 1)
    model = nn.Linear(4, 1).to("fakegpu:1")
    recorded, x = record(model), torch.ones(2, 4, device="fakegpu:1")
    trained(model, 2, x)
    model.forward = lambda x: torch.zeros(32 * MIB, device="fakegpu:1")
    with pytest.raises(torch.OutOfMemoryError):
        model(x)
    [found] = recorded.events("finding")
    evidence = found["evidence"]
    expected = {"device": "fakegpu:1", "tried_bytes": 128 * MIB, "capacity_bytes": 64 * MIB}
    assert {name: evidence[name] for name in expected} == expected
    assert evidence["allocator"]["num_ooms"] == 1


def test_a_lost_device_raises_in_the_script_alone(fakegpu: Control, record: Any) -> None:
    model, x = nn.Linear(4, 1).to("fakegpu:0"), torch.ones(2, 4, device="fakegpu:0")
    recorded = record(model)
    trained(model, 3, x)
    fakegpu.lose()
    with pytest.raises(torch.AcceleratorError):
        trained(model, 1, x)
    recorded.sender.rows.clear()  # those of the last steps will never be known


def test_no_time_is_known_between_marks_of_a_lost_device(fakegpu: Control) -> None:
    clock = DeviceClock(torch.device("fakegpu", 0))
    begin, end = clock.mark(), clock.mark()
    assert begin and end and clock.seconds(begin, end) is not None
    fakegpu.lose()
    assert (clock.seconds(begin, end), clock.mark()) == (None, None)
