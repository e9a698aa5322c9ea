"""In which line the training thread is while it is in no phase."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from perfagent.probes.unmeasured_lines import FIRST_LOOKS, UnmeasuredLines, is_unmeasured
from perfagent.step.state import state


class Loop:
    """A training whose thread is asked about from another one, where the test says."""

    def __init__(self, record) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.recorded, self.now = record(self.model), 0.0
        self.lines = UnmeasuredLines(self.recorded.sender, state.current, lambda: self.model, lambda: self.now)

    def step(self) -> None:
        self.model(torch.ones(1, 2)).sum().backward()
        self.optimizer.step()

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            thread = threading.Thread(target=self.lines.poll)
            thread.start()
            thread.join()

    def told(self) -> list[dict]:
        return self.recorded.events("lines")


@pytest.fixture
def loop(record) -> Loop:
    made = Loop(record)
    made.look(2 * FIRST_LOOKS)
    assert made.told() == [], "before the first step nobody looks"
    made.step()
    return made


def test_the_scripts_line_and_function_are_told(loop):
    """The thread is in Python's own threading.py then: libraries are looked through."""
    loop.look(FIRST_LOOKS)
    (told,) = loop.told()
    assert told["looks"] == sum(entry["count"] for entry in told["lines"]) == FIRST_LOOKS
    assert {entry["in"] for entry in told["lines"]} == {"Loop.look"}
    assert all(entry["line"].rsplit(":", 1)[0].endswith("test_unmeasured_lines.py") for entry in told["lines"])


def test_passes_the_optimizer_and_phases_are_measured(loop):
    met = []

    def ask(*_):
        met.append(is_unmeasured(state.current))

    loop.model.register_forward_hook(ask)
    loop.optimizer.register_step_pre_hook(ask)
    out = loop.model(torch.ones(1, 2))
    out.register_hook(ask)
    ask()  # the loss is computed: a part of the forward pass
    out.sum().backward()
    between = is_unmeasured(state.current)
    with loop.recorded.run.phase("eval"):
        ask()
    loop.optimizer.step()
    assert met == [False] * 5
    assert between, "between the backward pass and the optimizer's step it is in no phase"
    assert is_unmeasured(state.current), "nor between two steps"
