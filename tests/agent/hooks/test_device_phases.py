"""Phases by events of a device: a fake clock stands for CUDA, the training is real.

The fake device works through what it is given in order and takes as long as the test says, however long the host takes.
"""

from __future__ import annotations

import _thread
import logging
import threading
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from perfagent.device import DeviceClock, cuda_device_of
from perfagent.hooks.host_to_device import watch_copy
from perfagent.signals import gradient_schedule
from perfagent.step.state import state

MAIN, OTHER = 1, 2


class Event:
    """Recorded at a moment of the device; passed once the device has come so far."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.device.done >= self.at

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


class Device:
    """now: how much work it was given, in seconds; done: how much of it is over."""

    def __init__(self) -> None:
        self.now = self.done = 0.0
        self.made = 0
        self.free: list[Event] = []
        self.stream = MAIN
        self.device = torch.device("cuda", 1)

    def work(self, seconds: float) -> None:
        self.now += seconds

    # what DeviceClock has

    def mark(self) -> Event:
        if self.free:
            event = self.free.pop()
        else:
            self.made += 1
            event = Event(self)
        event.record()
        return event

    def seconds(self, begin: Event, end: Event) -> float:
        assert end.query(), "read before the device had come so far"
        return begin.elapsed_time(end) / 1e3

    def release(self, events: list[Event]) -> None:
        self.free.extend(events)


@pytest.fixture
def without_driver(monkeypatch):
    """What a CUDA build of torch would ask the driver, where there is none."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.delattr(torch._C, "_cuda_getCurrentStream", raising=False)


@pytest.fixture
def device(monkeypatch, without_driver):
    device = Device()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=device.stream))
    return device


class Worker(torch.autograd.Function):
    """Keeps the device busy in forward and backward."""

    @staticmethod
    def forward(ctx, x, device):
        ctx.device = device
        device.work(0.03)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.device.work(0.06)
        return gradient, None


class Net(nn.Linear):
    def __init__(self, device):
        super().__init__(4, 1)
        self.device = device

    def forward(self, x):
        return Worker.apply(super().forward(x), self.device)


class Batch:
    """Stands for a tensor on the host whose copy to the device takes a while."""

    def __init__(self, device: Device, data: torch.Tensor) -> None:
        self.device, self.data = device, data
        self.is_cpu, self.is_cuda = True, False


def to_device(batch: Batch, where: str) -> SimpleNamespace:
    batch.device.work(0.02)
    return SimpleNamespace(data=batch.data, is_cpu=where == "cpu", is_cuda=where == "cuda")


def train(record, device, copy, steps=4):
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    p = state.current
    p.clock, p.stream = device, MAIN
    for _ in range(steps):
        x = copy(Batch(device, torch.ones(2, 4)))
        model(x).square().mean().backward()
        optimizer.step()
        device.work(0.005)
    device.done = device.now
    return dict(recorded.steps())


def test_phases_are_the_device_s_time_and_copies_are_one(record, device):
    copy = watch_copy(to_device)
    steps = train(record, device, lambda batch: copy(batch, "cuda").data)
    for number, values in steps.items():
        if number > 1:
            assert values["phase/h2d_s"] == pytest.approx(0.02)
            assert values["phase/forward_s"] == pytest.approx(0.03)
            assert values["phase/backward_s"] == pytest.approx(0.06)


def test_a_copy_inside_the_forward_pass_is_taken_off_it(record, device):
    copy = watch_copy(to_device)

    class Copies(Net):
        def forward(self, batch):
            return super().forward(copy(batch, "cuda").data)

    model = Copies(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    for _ in range(3):
        model(Batch(device, torch.ones(2, 4))).square().mean().backward()
        optimizer.step()
    device.done = device.now
    for number, values in recorded.steps():
        if number > 1:
            assert values["phase/h2d_s"] == pytest.approx(0.02)
            assert values["phase/forward_s"] == pytest.approx(0.03)


@pytest.mark.usefixtures("nothing_compiled")
def test_compiling_inside_the_forward_pass_is_taken_off_it(record, device):
    def backend(graph, _inputs):
        device.work(1.0)  # the time for which it has nothing to do
        return graph.forward

    class Compiles(Net):
        scale = 1

        def forward(self, x):
            return super().forward(torch.compile(lambda x: x * self.scale, backend=backend, dynamic=False)(x))

    model = Compiles(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    for scale in (1, 1, 2):
        model.scale = scale
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    device.done = device.now
    [_, second, third] = [values for _, values in recorded.steps()]
    assert "phase/compile_s" not in second
    assert third["phase/compile_s"] == pytest.approx(1.0)
    assert [second["phase/forward_s"], third["phase/forward_s"]] == pytest.approx([0.03, 0.03])


def test_a_target_that_is_computed_without_gradients_is_forward_on_the_device_too(record, device):
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    for _ in range(4):
        with torch.no_grad():
            wanted = model(torch.ones(2, 4))
        device.work(0.005)  # neither of the two
        (model(torch.zeros(2, 4)) - wanted).square().mean().backward()
        optimizer.step()
    device.done = device.now
    for number, values in recorded.steps():
        if number > 1:
            assert values["phase/forward_s"] == pytest.approx(2 * 0.03)


def test_a_copy_inside_the_backward_pass_is_taken_off_it(record, device):
    copy = watch_copy(to_device)
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    model.weight.register_hook(lambda _: copy(Batch(device, torch.ones(1)), "cuda") and None)
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    device.done = device.now
    for number, values in recorded.steps():
        if number > 1:
            assert values["phase/h2d_s"] == pytest.approx(0.02)
            assert values["phase/backward_s"] == pytest.approx(0.06)


class Steps(torch.optim.SGD):
    """Its step keeps the device busy."""

    device: Device

    def step(self, closure=None):
        self.device.work(0.01)
        return super().step(closure)


def test_the_optimizer_s_phase_is_the_device_s_time_and_a_copy_inside_of_its_step_is_taken_off_it(record, device):
    copy = watch_copy(to_device)

    class Offloaded(Steps):
        def step(self, closure=None):
            copy(Batch(device, torch.ones(1)), "cuda")
            return super().step(closure)

    model = Net(device)
    optimizer = Offloaded(model.parameters(), lr=0.1)
    optimizer.device = device
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    for _ in range(4):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    device.done = device.now
    for number, values in recorded.steps():
        if number > 2:  # from then on the whole call is timed
            assert values["phase/h2d_s"] == pytest.approx(0.02)
            assert values["phase/optimizer_s"] == pytest.approx(0.01)
            assert values["phase/backward_s"] == pytest.approx(0.06)


@pytest.mark.parametrize("width", [1, 4], ids=["beside the one that counts", "the one that counts"])
def test_an_optimizer_that_steps_inside_of_the_backward_pass_is_no_part_of_that_on_the_device(record, device, width):
    model, inner = Net(device), nn.Linear(width, 4, bias=False)
    little, optimizer = Steps(inner.parameters(), lr=0.1), torch.optim.SGD(model.parameters(), lr=0.1)
    little.device = device
    recorded = record(model, optimizer=optimizer)
    state.current.clock, state.current.stream = device, MAIN
    steps = inner.weight.register_post_accumulate_grad_hook(lambda _: little.step())
    for _ in range(4):
        model(inner(torch.ones(2, width))).square().mean().backward()
        optimizer.step()
    steps.remove()
    device.done = device.now
    for number, values in recorded.steps():
        if number > 2:
            assert values["phase/backward_s"] == pytest.approx(0.06)
            assert values["phase/optimizer_s"] == pytest.approx(0.01)


def test_a_copy_on_another_stream_overlaps_and_is_not_counted(record, device):
    copy = watch_copy(to_device)

    def prefetch(batch):
        device.stream = OTHER
        try:
            return copy(batch, "cuda").data
        finally:
            device.stream = MAIN

    assert not any("phase/h2d_s" in values for values in train(record, device, prefetch).values())


def test_a_tensor_that_stays_on_the_host_is_no_copy_and_leaks_no_event(record, device):
    copy = watch_copy(to_device)
    steps = train(record, device, lambda batch: copy(batch, "cpu").data, steps=40)
    assert not any("phase/h2d_s" in values for values in steps.values())
    assert device.made <= 40 * 7, "an event that was not needed is used again"
    assert len(device.free) == device.made


def test_a_row_waits_for_the_device_and_not_the_training_for_it(record, device):
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    for _ in range(3):
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    rows = [row for row in recorded.sender.rows if hasattr(row, "trace")]
    assert rows
    assert not any(row.ready(recorded.sender.progress) for row in rows if row.step > 1), (
        "the device has done nothing yet"
    )
    device.done = device.now
    assert [number for number, _ in recorded.steps()] == [1, 2, 3]


def test_passes_over_gradients_come_as_seldom_as_what_they_take_of_the_device_asks(record, device, monkeypatch):
    """Of a large model a pass takes milliseconds there, and launching it a third of one."""
    original = gradient_schedule.norms

    def large(*arguments):
        device.work(30.0)
        return original(*arguments)

    monkeypatch.setattr(gradient_schedule, "norms", large)
    model = Net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    p = state.current
    p.clock, p.stream = device, MAIN
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    (row,) = [row for row in recorded.sender.rows if hasattr(row, "trace")]
    assert not row.rare.ready()
    device.done = device.now
    assert row.rare.ready()
    row.row(p)
    assert p.device_ns == pytest.approx(30e9, rel=0.1)
    p.measure_at = p.completed
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    assert p.measure_at == 1 + 1000, "as seldom as any"


def test_the_watched_copy_is_no_graph_break(monkeypatch):
    original = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", watch_copy(original), raising=False)
    from perfagent.boundary.dynamo import keep_out_of_frames

    keep_out_of_frames()
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.to(torch.float64) * 2, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0, dtype=torch.float64))
    torch._dynamo.reset()  # what comes after in this process is not compiled


def test_a_process_without_cuda_is_left_alone(record):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record(model)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert "to" not in vars(torch.Tensor)
    assert "cuda" not in vars(torch.Tensor)


# ---- a device that is not the current one


def test_marks_are_made_on_the_stream_of_the_device_that_computes(monkeypatch, without_driver) -> None:
    recorded = []

    class Recorded:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self, stream):
            recorded.append(stream)

    monkeypatch.setattr(torch.cuda, "Event", Recorded)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    second = torch.device("cuda", 1)
    DeviceClock(second).mark()
    assert recorded == [("stream of", second)]


@pytest.mark.parametrize(("places", "expected"), [(["cpu", "cuda:3"], 3), (["cpu"], 0), ([], 0)])
def test_the_device_of_a_run_is_where_its_parameters_are(places, expected) -> None:
    devices = [torch.device(place) for place in places]
    parameters = [SimpleNamespace(is_cuda=device.type == "cuda", device=device) for device in devices]
    assert cuda_device_of(SimpleNamespace(param_groups=[{"params": parameters}]), 0) == expected


def test_what_is_done_in_a_closure_is_no_time_of_the_optimizers_on_the_device(record, device):
    """Lightning's automatic optimization, skorch, LBFGS."""
    model = Net(device)
    optimizer = Steps(model.parameters(), lr=0.1)
    optimizer.device = device
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN

    def closure():
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()

    for _ in range(4):
        optimizer.step(closure)
    device.done = device.now
    for number, values in recorded.steps():
        if number > 2:  # from then on the whole call is timed
            assert values["phase/forward_s"] == pytest.approx(0.03)
            assert values["phase/backward_s"] == pytest.approx(0.06)
            assert values["phase/optimizer_s"] == pytest.approx(0.01)


@pytest.fixture
def two_ranks():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("logs", [False, True])
def test_a_log_record_in_the_autograd_engine_s_thread_hides_no_wait(record, device, two_ranks, logs):
    """FSDP2 waits there in backward. A log record makes Python note the thread, which it did not start."""

    class Waits(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            over = threading.Event()

            def engine():
                if logs:
                    logging.getLogger("hook").warning("a gradient")
                dist.all_reduce(torch.ones(1))
                over.set()

            _thread.start_new_thread(engine, ())
            assert over.wait(20)
            return gradient

    mark = device.mark
    device.mark = lambda: device.work(0.001) or mark()
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    state.current.clock, state.current.stream = device, MAIN
    for _ in range(3):
        Waits.apply(model(torch.ones(2, 4))).sum().backward()
        optimizer.step()
    device.done = device.now
    # of it one millisecond is between the end of the local part and that of the exchange
    assert recorded.of("phase/comm_s") == [(step, pytest.approx(0.002)) for step in (2, 3)], "watched from step 2 on"
