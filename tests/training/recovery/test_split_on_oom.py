"""Batches that do not fit: cut until they do, with the gradient of the whole batch, on all ranks alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from perfagent_loop.loop import loop
from perfagent_loop.split_on_oom import SplitOnOom, cut, is_out_of_memory


def memory_for(rows: int, model: Any, seen: list[int]) -> Any:
    """The mean loss of a piece, on a device that has room for so many rows."""

    def compute(piece: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = piece
        seen.append(len(inputs))
        loss: Tensor = (model(inputs) - targets).square().mean()
        if len(inputs) > rows:
            loss.backward()  # memory runs out in the middle of the backward pass: some gradients are there already
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    return compute


def a_loop() -> Any:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("room", "pieces"), [(16, 1), (8, 2), (3, 8), (1, 13)])
def test_the_gradient_is_that_of_the_whole_batch(room: int, pieces: int) -> None:
    training, reference = a_loop(), a_loop()
    inputs, targets = torch.randn(13, 4).double(), torch.randn(13, 2).double()
    whole = (reference.model(inputs) - targets).square().mean()
    whole.backward()
    split = SplitOnOom(training)
    loss = split.backward((inputs, targets), memory_for(room, training.model, []))
    assert split.pieces == pieces
    assert float(loss) == pytest.approx(whole.item(), rel=1e-12)
    for mine, right in zip(training.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-12, atol=1e-14)
    assert training.step().stepped
    assert training.step_count == 1


def test_what_was_found_stays_for_the_next_batch() -> None:
    training, seen = a_loop(), []
    split = SplitOnOom(training)
    for _ in range(2):
        split.backward((torch.randn(8, 4).double(), torch.randn(8, 2).double()), memory_for(2, training.model, seen))
        training.step()
    assert seen == [8, 4, 2, 2, 2, 2, 2, 2, 2, 2]


def test_the_error_of_a_single_row_comes_through_as_it_was() -> None:
    training, batch = a_loop(), (torch.randn(4, 4).double(), torch.randn(4, 2).double())
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        SplitOnOom(training).backward(batch, memory_for(0, training.model, []))


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    training, calls = a_loop(), []

    def wrong(piece: Any) -> Tensor:
        calls.append(1)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        SplitOnOom(training).backward(torch.randn(4, 4), wrong)
    assert len(calls) == 1
    assert is_out_of_memory(RuntimeError("CUDA out of memory"))
    assert is_out_of_memory(MemoryError())


def test_batches_of_every_form_are_cut_by_rows() -> None:
    first, second = cut(
        {"ids": torch.arange(5), "pair": (torch.zeros(5, 2), [torch.ones(5)]), "names": [*"abcde"], "k": 3}, 2
    )
    assert first["ids"].tolist() == [0, 1]
    assert second["ids"].tolist() == [2, 3, 4]
    assert second["pair"][1][0].shape == (3,)
    assert (first["names"], second["names"], first["k"]) == (["a", "b"], ["c", "d", "e"], 3)
