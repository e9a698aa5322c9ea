"""Rare looks at a step: they come by themselves, one at a time, and leave nothing behind."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from perfagent.boundary.call_slot import CALL
from perfagent.probes.scheduler import IDLE_S, ScheduledProbes

pytestmark = pytest.mark.usefixtures("nothing_compiled")


class Clock:
    """Seconds by hand. ticks: how far each look at it moves it on."""

    def __init__(self, ticks=0.0):
        self.now, self.ticks = 0.0, ticks

    def __call__(self):
        self.now += self.ticks
        return self.now


class Training:
    """A recorded training whose looks are on a clock of the test's. Asking takes no CPU, whatever this machine does."""

    def __init__(self, recorded, model, *, ticks=0.001):
        self.recorded, self.model, self.clock = recorded, model, Clock(ticks)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        investigator = recorded.progress.links.investigator
        self.looks = ScheduledProbes(
            investigator, recorded.sender, lambda: model, lambda: None, self.clock, lambda: 0.0
        )

    def train(self, x, steps):
        """With the sender's part of the work after each."""
        for _ in range(steps):
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.recorded.rows += self.recorded.sender.drain()
            self.looks.poll()

    def totals(self):
        """The operations that were counted, by the size of the step."""
        return {size: known.total for size, known in self.looks.flops.known.items()}

    def told(self):
        """The operations that are told of each step; ends the run."""
        self.looks.close()
        seconds = dict(self.recorded.of("step_time_s"))
        return {number: pytest.approx(value * seconds[number]) for number, value in self.recorded.of("flops_per_s")}


@pytest.fixture
def training(record):
    """training(model, ...)"""
    made = []

    def start(model, **options):
        made.append(Training(record(model), model, **options))
        return made[-1]

    yield start
    for each in made:
        each.looks.close()


def linears(*widths):
    return nn.Sequential(*(layer for one, two in pairwise(widths) for layer in (nn.Linear(one, two), nn.ReLU())))


def test_another_batch_size_is_counted_once_and_then_exact(training):
    of = training(linears(64, 128, 1), ticks=0.0)
    of.train(torch.randn(16, 64), 15)
    of.train(torch.randn(4, 64), 3)
    of.clock.now += IDLE_S
    of.train(torch.randn(4, 64), 12)
    per_sample = 2 * (64 * 128 * 2 + 128 * 3)
    assert of.totals() == {(16, 0, 64): 16 * per_sample, (4, 0, 64): 4 * per_sample}
    told = of.told()
    assert told[15] == 16 * per_sample
    assert {number: told[number] for number in range(16, 31)} == dict.fromkeys(range(16, 31), 4 * per_sample)


def test_operations_are_counted_anew_when_layers_are_unfrozen(training):
    of = training(linears(64, 128, 1), ticks=1.0)
    of.model[0].requires_grad_(False)
    for unfrozen in (False, True):
        of.model[0].requires_grad_(unfrozen)
        of.train(torch.randn(16, 64), 30)
        assert of.totals() == {(16, 0, 64): 16 * 2 * (64 * 128 * (1 + unfrozen) + (2 + unfrozen) * 128)}


# ---- when looks come, and how they end


def test_a_run_looks_at_its_steps_by_itself(record):
    model = linears(64, 512, 64)
    recorded, optimizer = record(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(30):
        model(torch.randn(256, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        recorded.tick()
    series, seconds = recorded.of("flops_per_s"), dict(recorded.of("step_time_s"))
    assert len(series) >= 15
    assert {number: value * seconds[number] for number, value in series} == pytest.approx(
        dict.fromkeys(dict(series), 256 * 2 * (64 * 512 * 5))
    )
    assert not recorded.of("mfu"), "there is no peak of a CPU"
    shares = [values for _, values in recorded.rows if "module_share/0" in values]
    assert len(shares) == 1, "one look within a minute"


def test_the_end_of_a_run_takes_a_look_that_is_going_on_out(record):
    model = linears(64, 512, 1)
    recorded, optimizer = record(model), torch.optim.SGD(model.parameters(), lr=0.01)
    backward = torch.autograd.backward
    for _ in range(40):
        model(torch.randn(2, 64)).square().mean().backward()
        optimizer.step()
        recorded.tick()
        if torch.autograd.backward is not backward:
            break
    else:
        raise AssertionError("no look began")
    recorded.finish()
    assert not torch.autograd.backward.__qualname__.startswith("FlopCount")
    assert not any(CALL in module.__dict__ for module in model.modules())
    assert not torch.autograd._profiler_enabled()


def test_a_compiled_model_keeps_its_graph_and_its_results(record):
    def trained(*, watched):
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(5)
        model = linears(64, 128, 1)
        compiled, recorded = torch.compile(model, backend="eager"), record(model) if watched else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(20):
            compiled(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if recorded is not None:
                recorded.tick()
        return recorded, [parameter.detach().clone() for parameter in model.parameters()]

    _, weights = trained(watched=False)
    recorded, watched = trained(watched=True)
    assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    assert all(map(torch.equal, weights, watched))
    seconds, series = dict(recorded.of("step_time_s")), recorded.of("flops_per_s")
    assert series
    assert all(value * seconds[number] == pytest.approx(16 * 2 * (64 * 128 * 2 + 3 * 128)) for number, value in series)
    assert not any(name.startswith("module_share/") for _, values in recorded.rows for name in values)
