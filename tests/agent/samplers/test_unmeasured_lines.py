"""In which line the training thread is while it is in no phase."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from perfagent.samplers.unmeasured_lines import FIRST_LOOKS, UnmeasuredLines, is_unmeasured
from perfagent.step.state import state


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """A training whose thread is asked about from another one, where the test says."""

    def __init__(self, record) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recorded = record(self.model)
        self.clock = Clock()
        self.lines = UnmeasuredLines(self.recorded.sender, state.current, lambda: self.model, self.clock)
        self.step()

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            thread = threading.Thread(target=self.lines.poll)
            thread.start()
            thread.join()

    def told(self) -> list[dict]:
        return [data for kind, data, _ in self.recorded.sender.events if kind == "lines"]


@pytest.fixture
def loop(record) -> Loop:
    return Loop(record)


def plot(loop: Loop, times: int) -> None:
    loop.look(times)


def test_the_script_s_line_and_function_are_told(loop):
    """The thread is in Python's own threading.py then: libraries are looked through."""
    plot(loop, FIRST_LOOKS)
    [told] = loop.told()
    assert told["looks"] == FIRST_LOOKS
    assert sum(entry["count"] for entry in told["lines"]) == FIRST_LOOKS
    assert {entry["in"] for entry in told["lines"]} == {"Loop.look"}
    assert all(entry["line"].rsplit(":", 1)[0].endswith("test_unmeasured_lines.py") for entry in told["lines"])


def test_passes_the_optimizer_the_loader_and_phases_are_measured(loop):
    met = []

    class Asks(nn.Module):
        def forward(self, x):
            met.append(is_unmeasured(state.current))
            return x

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            met.append(is_unmeasured(state.current))
            return super().step(closure)

    asks = Asks()
    out = asks(loop.model(torch.ones(1, 2)))
    out.register_hook(lambda grad: met.append(is_unmeasured(state.current)))
    met.append(is_unmeasured(state.current))  # the loss is computed: a part of the forward pass
    out.sum().backward()
    with loop.recorded.run.phase("eval"):
        met.append(is_unmeasured(state.current))
    loop.optimizer.step()
    assert met == [False] * len(met)
    assert len(met) == 4
    assert is_unmeasured(state.current), "between two steps"


def test_between_backward_and_optimizer_it_is_no_phase(loop):
    loop.model(torch.ones(1, 2)).sum().backward()
    assert is_unmeasured(state.current)
    loop.optimizer.step()


def test_an_evaluation_is_none_of_it(loop):
    loop.model.eval()
    loop.look(FIRST_LOOKS)
    assert loop.told() == []


def test_nothing_is_told_where_little_is_unmeasured_and_again_only_after_a_minute(loop):
    with loop.recorded.run.phase("eval"):
        loop.look(FIRST_LOOKS)
    assert loop.told() == []
    loop.look(2 * FIRST_LOOKS)
    assert loop.told() == []
    loop.clock.now += 61
    loop.look(1)
    assert len(loop.told()) == 1
    loop.look(2 * FIRST_LOOKS)
    assert len(loop.told()) == 1


def test_before_the_first_step_and_after_the_end_nobody_looks(record):
    recorded = record(nn.Linear(2, 1))
    lines = UnmeasuredLines(recorded.sender, state.current, lambda: None, Clock())
    for _ in range(2 * FIRST_LOOKS):
        lines.poll()
    assert not [kind for kind, *_ in recorded.sender.events if kind == "lines"]


def test_a_look_keeps_nothing_of_the_thread_alive(loop):
    import gc
    import weakref

    def body():
        kept = nn.Linear(1, 1)
        loop.look(3)
        return weakref.ref(kept)

    gone = body()
    gc.collect()
    assert gone() is None
