"""The batch that a bad step was trained on, found among the variables of the loop."""

from __future__ import annotations

import sys
import weakref

import torch

from perfagent.rootcause.batch import in_callers


def test_the_batch_of_the_loop_is_found_by_its_size() -> None:
    def train() -> tuple[str, list[str]]:
        inputs, labels = torch.ones(6, 3), torch.zeros(6)  # noqa: F841
        table, loss = torch.ones(5, 3), torch.ones(6, requires_grad=True).exp()  # noqa: F841
        where, found = in_callers(6, sys._getframe())
        return where, [name for name, _ in found]

    where, names = train()
    assert names == ["inputs", "labels"]
    assert where.startswith("local variables of train (")


def test_what_was_looked_at_is_let_go() -> None:
    """Up to Python 3.12 a look at `f_locals` keeps all that a function holds until it returns: here that would be a batch."""

    def train() -> bool:
        inputs = torch.ones(6, 3)
        gone = weakref.ref(inputs)
        assert in_callers(6, sys._getframe())[1]
        del inputs
        return gone() is None

    assert train()
