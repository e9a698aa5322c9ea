"""The operator that made the first NaN, read from a graph: what is run again for it, and what is left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from perfagent.rootcause.evidence import Evidence
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


def test_a_product_of_two_wide_tensors_is_run_again() -> None:
    """A multiplication for each number, and not for each number and column."""
    first, second = factors((64, 16_384), (64, 16_384))
    assert named(torch.softmax(first * second, -1).sum()) == ("Mul", "inf")


@pytest.mark.parametrize(("side", "run"), [(5_700, True), (5_800, False)])
def test_what_makes_more_than_128_mib_is_not_run_again(side: int, run: bool) -> None:
    """An outer product makes far more than it reads."""
    row, column = factors((1, side), (side, 1), dtype=torch.bfloat16)
    found = named(torch.softmax((row * column)[:1], -1).sum())
    assert found == (("Mul", "inf") if run else ("Softmax", None))


@pytest.mark.parametrize(("side", "run"), [(640, True), (650, False)])
def test_what_takes_many_multiplications_is_not_run_again(side: int, run: bool) -> None:
    first, second = factors((side, side), (side, side))
    found = named(torch.softmax(first @ second, -1).sum())
    assert found == (("Mm", "inf") if run else ("Softmax", None))


@pytest.mark.parametrize("looks", [0, 3])
def test_once_its_time_is_over_nobody_further_back_is_blamed(looks: int) -> None:
    """looks: at the clock, until it is over."""
    first, second = factors((2, 4), (2, 4))
    times = iter([0.0] * (1 + looks))
    found = first_bad_operator(torch.softmax(first * second, -1).sum(), {}, clock=lambda: next(times, MOST_S + 1))
    assert found is None or (looks and "made" not in found)


class Watched(torch.Tensor):
    """A tensor of a library's own class, which may ask other ranks or a device when it is looked at."""

    looks = 0

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.isfinite:
            cls.looks += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_tensors_of_other_classes_are_left_alone() -> None:
    x = torch.full((3,), 1e30).as_subclass(Watched).requires_grad_()
    first_bad_operator(torch.softmax(x * x, -1).sum(), {})
    assert Watched.looks == 0


def test_looking_leaves_graph_and_random_numbers_as_they_were() -> None:
    state = torch.get_rng_state()
    first, second = factors((4, 8), (4, 8))
    version, loss = first._version, torch.softmax(first * second, -1).sum()
    first_bad_operator(loss, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert (first._version, first.grad) == (version, None)
    loss.backward()


def test_evidence_that_cannot_be_added_to_is_told_as_it_is() -> None:
    assert dict(Evidence({"step": 3}, lambda: None)) == {"step": 3}
    assert dict(Evidence({"step": 3}, lambda: {"history": []})) == {"step": 3, "history": []}
