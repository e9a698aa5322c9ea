"""Shares of modules that are called in uncommon ways."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from perfagent.boundary.call_slot import CALL
from perfagent.signals.modules import ModuleTimes
from perfagent.step.state import state


class Tree(nn.Module):
    """Calls itself for what lies below, as models of trees do. depth: how many levels."""

    def __init__(self) -> None:
        super().__init__()
        self.node = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, depth: int = 8) -> torch.Tensor:
        return self.node(x) if not depth else self(x, depth - 1) + x


class Parser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree, self.head = Tree(), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.tree(x))


def looked_at(model: nn.Module) -> ModuleTimes:
    """A look at one step of it, after others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randn(16, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    assert state.current is not None
    state.current.probe = None
    look = ModuleTimes(state.current, model)
    assert look.at_boundary()
    step()
    assert not look.at_boundary()
    assert not any(CALL in module.__dict__ for name, module in model.named_modules() if name)
    return look


def test_a_part_that_calls_itself_counts_once(record):
    model = Parser()
    record(model)
    look = looked_at(model)
    assert {name: len(spans) for name, spans in look._spans.items()} == {"tree": 1, "tree.node": 1, "head": 1}
    shares = look.shares()
    assert shares["module_share/tree"] + shares["module_share/head"] <= 1.0


class Failing(Parser):
    """In every step the first of two calls fails, and the loop does not notice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            self.tree(x[:, :3], 2)  # the shape does not fit
        return super().forward(x)


def test_a_call_of_a_part_that_failed_does_not_hide_those_that_follow(record):
    model = Failing()
    record(model)
    assert len(looked_at(model)._spans["tree"]) == 2
