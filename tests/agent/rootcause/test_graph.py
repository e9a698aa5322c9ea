"""The operator that made the first NaN, read from a graph: what is run again for it, and what is left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from perfagent.rootcause.graph import MOST_S, first_bad_operator


def factors(*shapes: tuple[int, int], **more: Any) -> list[torch.Tensor]:
    """Two tensors whose product is too large in one place. No operator keeps it: the softmax behind it is the first to
    show the NaN."""
    made = [torch.ones(*shape, **more) for shape in shapes]
    for one in made:
        one[0, 0] = 1e30
    return [one.requires_grad_() for one in made]


def named(loss: torch.Tensor, **more: Any) -> tuple[str, str | None]:
    assert math.isnan(loss.item())
    found = first_bad_operator(loss, {}, **more)
    assert found is not None
    return found["operator"], found.get("made")


@pytest.mark.parametrize(("side", "run"), [(5_700, True), (5_800, False)])
def test_what_makes_more_than_128_mib_is_not_run_again(side: int, run: bool) -> None:
    """An outer product makes far more than it reads."""
    row, column = factors((1, side), (side, 1), dtype=torch.bfloat16)
    found = named(torch.softmax((row * column)[:1], -1).sum())
    assert found == (("Mul", "inf") if run else ("Softmax", None))


@pytest.mark.parametrize("looks", [0, 3])
def test_once_its_time_is_over_nobody_further_back_is_blamed(looks: int) -> None:
    """looks: at the clock, until it is over."""
    first, second = factors((2, 4), (2, 4))
    times = iter([0.0] * (1 + looks))
    found = first_bad_operator(torch.softmax(first * second, -1).sum(), {}, clock=lambda: next(times, MOST_S + 1))
    assert found is None or (looks and "made" not in found)
