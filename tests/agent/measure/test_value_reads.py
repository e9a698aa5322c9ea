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
    """measured(body): the look at three steps, each with this after the optimizer's step."""

    def run(body):
        step = stepping(record)
        step()
        look = ValueReads(state.current, clock)
        before = {name: vars(torch.Tensor).get(name) for name in READS}
        assert look.at_boundary()
        for number in range(3):
            body()
            step()
            assert look.at_boundary() == (number < 2)
        assert look.over
        assert {name: vars(torch.Tensor).get(name) for name in READS} == before
        return look

    return run


def count_one_by_one():
    found = 0
    for place in range(len(VALUES)):
        if VALUES[place].item() == 3:
            found += 1
    return found


LINE = f"test_value_reads.py:{count_one_by_one.__code__.co_firstlineno + 3}"


def test_a_loop_over_values_is_told_with_its_line_and_its_time(measured):
    look = measured(count_one_by_one)
    assert [(entry["line"].rsplit("/", 1)[-1], entry["count"]) for entry in look.most_frequent()] == [(LINE, 200)]
    assert look.values() == {"sync/reads_per_step": 200.0, "sync/reading_s": pytest.approx(LOOP_S)}
    assert look.step == 3


def implicitly():
    """Whole tensors do not count."""
    loss = torch.tensor(0.5, requires_grad=True)
    if loss > 3:
        raise AssertionError
    float(loss.detach())
    f"{loss.detach():.3f}"
    torch.arange(10).tolist()
    loss.detach().numpy()


def elsewhere():
    """In torch's own code, on another thread and in an evaluation."""
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2)) for _ in range(5)], foreach=False)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    thread = threading.Thread(target=count_one_by_one)
    thread.start()
    thread.join()
    state.current.phase_depth += 1
    count_one_by_one()
    state.current.phase_depth -= 1


@pytest.mark.parametrize(("body", "count"), [(implicitly, 3), (elsewhere, 0)])
def test_reads_of_the_script_count(measured, body, count):
    assert measured(body).values()["sync/reads_per_step"] == count


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
    (event,) = recorded.events("sync")
    assert event["lines"][0]["count"] == 200
