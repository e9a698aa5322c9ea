"""Batches that do not fit: cut until they do, with the gradient of the whole batch. Two ranks are in loop/ranks_job.py."""

from __future__ import annotations

import pytest
import torch
from big_batches import Batch, batches_of, flat, loss_of, net
from torch import Tensor

import perfagent
from perfagent_loop.split_on_oom import cut


def a_loop() -> perfagent.Loop:
    model = net().double()
    return perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize(("room", "pieces"), [(16, 1), (8, 2), (3, 8), (1, 13)])
def test_the_gradient_is_that_of_the_whole_batch(room: int, pieces: int) -> None:
    """On a device with room for so many rows. What was found stays for the next batch."""
    training, reference, seen = a_loop(), a_loop(), list[int]()
    split = perfagent.SplitOnOom(training)

    def compute(piece: Batch) -> Tensor:
        seen.append(len(piece[0]))
        loss = loss_of(training.model, piece)
        if len(piece[0]) > room:
            loss.backward()  # some gradients are there when memory runs out
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return loss

    for steps, (x, y) in enumerate(batches_of([13, 13]), start=1):
        seen.clear()
        whole = loss_of(reference.model, (x.double(), y.double()))
        reference.backward(whole)
        loss = split.backward((x.double(), y.double()), compute)
        assert float(loss) == pytest.approx(whole.item(), rel=1e-12)
        assert training.step().stepped
        assert training.step_count == steps
        reference.step()
        torch.testing.assert_close(flat(training.model), flat(reference.model), rtol=1e-12, atol=1e-14)
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

    def wrong(piece: Batch) -> Tensor:
        seen.append(len(piece[0]))
        raise kind(said)

    with pytest.raises(kind, match=said):
        perfagent.SplitOnOom(a_loop()).backward(batches_of([4])[0], wrong)
    assert seen == sizes


def test_batches_of_every_form_are_cut_by_rows() -> None:
    first, second = cut(
        {"ids": torch.arange(5), "pair": (torch.zeros(5, 2), [torch.ones(5)]), "names": [*"abcde"], "k": 3}, 2
    )
    assert (first["ids"].tolist(), second["ids"].tolist()) == ([0, 1], [2, 3, 4])
    assert second["pair"][1][0].shape == (3,)
    assert (first["names"], second["names"], first["k"]) == (["a", "b"], ["c", "d", "e"], 3)
