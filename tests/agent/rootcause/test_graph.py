"""The operator that made the first NaN, read from a graph: what is run again for it, and what is left alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from perfagent.rootcause import graph
from perfagent.rootcause.evidence import Evidence
from perfagent.rootcause.graph import first_bad_operator


def overflowing(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A product that no operator keeps, and its two factors' loss: the softmax behind it is the first to show the
    NaN."""
    first, second = torch.ones(rows, columns, requires_grad=True), torch.ones(rows, columns, requires_grad=True)
    with torch.no_grad():
        first[0, 0] = second[0, 0] = 1e30
    return torch.softmax(first * second, -1).sum(), first


def test_a_product_of_two_wide_tensors_is_run_again() -> None:
    """A multiplication for each number, and not for each number and column."""
    loss, _ = overflowing(64, 16_384)
    assert math.isnan(loss.item())
    found = first_bad_operator(loss, {})
    assert found is not None
    assert (found["operator"], found["made"]) == ("Mul", "inf")


def test_what_would_take_much_memory_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outer product makes far more than it reads."""
    monkeypatch.setattr(graph, "MOST_MADE", 1000)
    made: list[int] = []
    monkeypatch.setitem(graph._AGAIN, "Mul", (("self", "other"), lambda x, y: made.append(1) or x * y))
    row, column = torch.full((1, 40), 1e30, requires_grad=True), torch.full((40, 1), 1e30, requires_grad=True)
    found = first_bad_operator(torch.softmax(row * column, -1).sum(), {})
    assert found is not None
    assert (found["operator"], made) == ("Softmax", [])


@pytest.mark.parametrize(
    ("shapes", "size"),
    [
        (((1, 3000), (3000, 1)), (9_000_000, 9_000_000)),
        (((5, 7), (7,)), (35, 35)),
    ],
)
def test_the_size_of_a_broadcast_is_that_of_its_result(shapes: Any, size: tuple[int, int]) -> None:
    assert graph._size(graph._AGAIN["Mul"][1], [torch.empty(shape) for shape in shapes]) == size


def test_the_size_of_a_product_of_matrices_is_told_apart_from_its_work() -> None:
    assert graph._size(graph._AGAIN["Bmm"][1], [torch.empty(2, 3, 5), torch.empty(2, 5, 7)]) == (
        2 * 3 * 7,
        2 * 3 * 5 * 7,
    )


def test_once_its_time_is_over_the_look_blames_nobody_further_back(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = overflowing(2, 4)
    times = iter([0.0] * 3 + [1e9] * 100)
    monkeypatch.setattr(graph.time, "monotonic", lambda: next(times))
    found = first_bad_operator(loss, {})
    assert found is None or "made" not in found


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
    loss = torch.softmax(x * x, -1).sum()
    first_bad_operator(loss, {})
    assert Watched.looks == 0


def test_looking_leaves_the_graph_and_the_random_numbers_as_they_were() -> None:
    state = torch.get_rng_state()
    loss, first = overflowing(4, 8)
    versions = first._version
    first_bad_operator(loss, {})
    assert torch.equal(torch.get_rng_state(), state)
    assert first._version == versions
    assert first.grad is None
    loss.backward()


def test_evidence_that_cannot_be_added_to_is_told_as_it_is() -> None:
    assert dict(Evidence({"step": 3}, lambda: None)) == {"step": 3}
    assert dict(Evidence({"step": 3}, lambda: {"history": []})) == {"step": 3, "history": []}
