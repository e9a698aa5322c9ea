"""Loops that read single values of tensors on the CPU: how many, how long, and where."""

from __future__ import annotations

import threading

import pytest
import torch
from agent.hooks.loops import stepping
from torch import nn

from perfagent.measure.value_reads import READS, ValueReads
from perfagent.step.state import state

pytestmark = pytest.mark.usefixtures("nothing_compiled")
VALUES = torch.arange(200)
TICK_NS = 100
"""What each look at the clock takes: a read of 100 ns, and 100 ns to the next one of a loop."""
LOOP_S = (200 + 199) * TICK_NS / 1e9


class Clock:
    now = 0

    def __call__(self):
        self.now += TICK_NS
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def measured(record, clock):
    """measured(*bodies): the look at three steps; each does what its body says after the optimizer's step."""

    def run(*bodies):
        step = stepping(record)
        step()
        look = ValueReads(state.current, clock)
        before = {name: vars(torch.Tensor).get(name) for name in READS}
        assert look.at_boundary()
        for number, body in enumerate(bodies * (3 // len(bodies))):
            body()
            step()
            assert look.at_boundary() == (number < 2)
        assert look.over
        assert {name: vars(torch.Tensor).get(name) for name in READS} == before
        return look

    return run


def count_one_by_one(then=lambda place: None):
    found = 0
    for place in range(len(VALUES)):
        if VALUES[place].item() == 3:
            found += 1
        then(place)
    return found


LINE = f"test_value_reads.py:{count_one_by_one.__code__.co_firstlineno + 3}"


def reads(look):
    return look.values()["sync/reads_per_step"]


def test_a_loop_over_values_is_told_with_its_line_and_its_time(measured):
    look = measured(count_one_by_one)
    assert [(entry["line"].rsplit("/", 1)[-1], entry["count"]) for entry in look.told()] == [(LINE, 200)]
    assert look.values() == {"sync/reads_per_step": 200.0, "sync/reading_s": pytest.approx(LOOP_S)}
    assert look.step == 3


def test_implicit_reads_count_too_and_whole_tensors_do_not(measured):
    loss = torch.tensor(0.5, requires_grad=True)

    def body():
        if loss > 3:
            raise AssertionError
        float(loss.detach())
        f"{loss.detach():.3f}"
        torch.arange(10).tolist()
        loss.detach().numpy()

    assert reads(measured(body)) == 3


def test_reads_of_torch_threads_and_evaluations_are_left_out(measured):
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2)) for _ in range(5)], foreach=False)

    def body():
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones(2)
        optimizer.step()
        thread = threading.Thread(target=count_one_by_one)
        thread.start()
        thread.join()
        state.current.phase_depth += 1
        count_one_by_one()
        state.current.phase_depth -= 1

    assert reads(measured(body)) == 0


def test_a_run_tells_them_as_series_and_an_event(record):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    for _ in range(30):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        count_one_by_one()
        recorded.tick()
    assert [value for _, value in recorded.of("sync/reads_per_step")] == [200.0]
    assert recorded.of("sync/calls_per_step") == [], "nothing waits for a device where there is none"
    assert [value > 0 for _, value in recorded.of("sync/reading_s")] == [True]
    (event,) = recorded.events("sync")
    assert event["lines"][0]["count"] == 200
