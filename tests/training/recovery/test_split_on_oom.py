"""Batches that do not fit: cut until they do, with the gradient of the whole batch, on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from perfagent_loop.loop import Loop, loop
from perfagent_loop.split_on_oom import SplitOnOom, cut

Pair = tuple[Tensor, Tensor]


def memory_for(rows: int, training: Loop, seen: list[int]) -> Callable[[Pair], Tensor]:
    """The mean loss of a piece, on a device that has room for so many rows."""

    def compute(piece: Pair) -> Tensor:
        inputs, targets = piece
        seen.append(len(inputs))
        loss: Tensor = (training.model(inputs) - targets).square().mean()
        if len(inputs) > rows:
            loss.backward()  # type: ignore[no-untyped-call] # some gradients are there when memory runs out
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    return compute


def a_loop() -> Loop:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return loop(model, torch.optim.SGD(model.parameters(), lr=0.1))


def batch_of(rows: int) -> Pair:
    return torch.randn(rows, 4).double(), torch.randn(rows, 2).double()


@pytest.mark.parametrize(("room", "pieces"), [(16, 1), (8, 2), (3, 8), (1, 13)])
def test_the_gradient_is_that_of_the_whole_batch(room: int, pieces: int) -> None:
    """What was found stays for the next batch."""
    training, reference, seen = a_loop(), a_loop(), list[int]()
    split = SplitOnOom(training)
    for steps in (1, 2):
        seen.clear()
        inputs, targets = batch_of(13)
        whole = (reference.model(inputs) - targets).square().mean()
        reference.backward(whole)
        loss = split.backward((inputs, targets), memory_for(room, training, seen))
        assert float(loss) == pytest.approx(whole.item(), rel=1e-12)
        for mine, right in zip(training.model.parameters(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, right.grad, rtol=1e-12, atol=1e-14)
        assert training.step().stepped
        assert training.step_count == steps
        reference.step()
    assert (split.pieces, len(seen), sum(seen)) == (pieces, pieces, 13)


@pytest.mark.parametrize(
    ("kind", "said", "sizes"),
    [
        (torch.OutOfMemoryError, "Tried to allocate", [4, 2, 1]),
        (RuntimeError, "CUDA out of memory", [4, 2, 1]),
        (MemoryError, "no room", [4, 2, 1]),
        (RuntimeError, "mat1 and mat2 shapes cannot be multiplied", [4]),
    ],
)
def test_what_no_cut_helps_comes_through_as_it_was(kind: type[Exception], said: str, sizes: list[int]) -> None:
    seen = []

    def wrong(piece: Pair) -> Tensor:
        seen.append(len(piece[0]))
        raise kind(said)

    with pytest.raises(kind, match=said):
        SplitOnOom(a_loop()).backward(batch_of(4), wrong)
    assert seen == sizes


def test_batches_of_every_form_are_cut_by_rows() -> None:
    first, second = cut(
        {"ids": torch.arange(5), "pair": (torch.zeros(5, 2), [torch.ones(5)]), "names": [*"abcde"], "k": 3}, 2
    )
    assert first["ids"].tolist() == [0, 1]
    assert second["ids"].tolist() == [2, 3, 4]
    assert second["pair"][1][0].shape == (3,)
    assert (first["names"], second["names"], first["k"]) == (["a", "b"], ["c", "d", "e"], 3)
