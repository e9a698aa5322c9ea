"""Runs whose gradients are measured in every step, or never again; and a clock that only a test's own naps move."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time

import pytest
from agent.hooks import loops

from perfagent import causes, hooks, measure
from perfagent.step import state


class VirtualClock:
    """Stands still but for `sleep` and a microsecond a reading: what a busy machine does to a test's steps is in no
    figure."""

    def __init__(self) -> None:
        self.ns = time.perf_counter_ns()

    def read_ns(self) -> int:
        self.ns += 1000
        return self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    """The clock by which the agent takes the times of steps and phases. Comes before `record`."""
    for package in (causes, hooks, measure):  # what is imported later would keep this test's clock
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)
    virtual = VirtualClock()
    for name, module in list(sys.modules.items()):
        if name.startswith("perfagent.") and getattr(module, "now", None) is state.now and module is not state:
            monkeypatch.setattr(module, "now", virtual.read_ns)
    monkeypatch.setattr(state, "now", virtual.read_ns)
    monkeypatch.setattr(time, "perf_counter_ns", virtual.read_ns)
    monkeypatch.setattr(loops, "sleep", virtual.sleep)
    monkeypatch.setattr(time, "monotonic", lambda: virtual.ns / 1e9)
    return virtual


@pytest.fixture
def every_step(record):
    """every_step(model=None, optimizer=None): a run that measures the gradients of every step."""

    def start(model=None, optimizer=None):
        return record(model, optimizer=optimizer, overhead_budget_pct=1e9)

    return start


@pytest.fixture
def seldom(record):
    """A run that measures nothing after the first step: what it tells of later ones, clipping has computed."""

    def start(model=None, optimizer=None):
        recorded = record(model, optimizer=optimizer)
        recorded.progress.measure_at = 2**60
        return recorded

    return start
