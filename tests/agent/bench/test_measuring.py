from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from perfagent.bench.measuring import bytes_of, in_turn, medians, peak_bytes, seeded
from perfagent.bench.workers import Epochs, Waiting, epochs_of

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_is_the_most_that_was_held_at_a_time() -> None:
    kept: list[torch.Tensor] = []

    def call() -> None:
        first = torch.zeros(4 * MIB, dtype=torch.uint8)
        second = torch.zeros(8 * MIB, dtype=torch.uint8)
        del first, second
        kept.append(torch.zeros(MIB, dtype=torch.uint8))

    assert peak_bytes(call, CPU) == 12 * MIB


def test_the_peak_of_a_backward_pass_counts_what_forward_kept_for_it() -> None:
    layers = torch.nn.Sequential(*(torch.nn.Tanh() for _ in range(6)))
    x = torch.zeros(MIB // 4, requires_grad=True)  # 1 MiB
    six_kept_and_one_gradient = peak_bytes(lambda: layers(x).sum().backward(), CPU)
    assert 7 * MIB <= six_kept_and_one_gradient < 7.1 * MIB


def test_what_models_and_optimizers_hold_is_counted() -> None:
    model = torch.nn.Linear(100, 10, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    assert bytes_of(model, optimizer) == 4000
    model(torch.ones(100)).sum().backward()
    optimizer.step()
    assert bytes_of(model, optimizer) == 4 * 4000 + 4  # weights, gradients, two moments; a count of steps


def test_every_way_is_called_once_a_round_and_the_first_round_is_left_out() -> None:
    calls: list[str] = []
    found = in_turn({name: lambda name=name: calls.append(name) for name in ("a", "b")}, CPU, rounds=3)
    assert (calls.count("a"), calls.count("b")) == (4, 4)
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}
    assert all({calls[2 * number], calls[2 * number + 1]} == {"a", "b"} for number in range(4))
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}


def test_seeded_numbers_leave_those_of_the_caller_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded():
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with seeded():
        assert torch.equal(torch.rand(3), first)


def test_an_epoch_of_a_running_training_is_told_apart_from_its_batches_and_from_the_first_one() -> None:
    """Two workers: batches come in twos. The first epoch waits 5 s for the workers, the later ones 1 s."""
    epochs = Epochs([[6.0, 6.0, 7.0, 7.0, 8.0, 8.0], [2.0, 2.0, 3.0, 3.0, 4.0, 4.0], [2.0, 2.0, 3.0, 3.0, 4.5, 4.5]], 2)
    assert epochs.first_s == 8.0
    assert epochs.later_s == 4.25
    assert epochs.between_s == 0.5  # not (8 - 6) / 5: the batch beside the first was there with it


def test_loaders_take_turns_epoch_by_epoch() -> None:
    begun: list[str] = []

    class Noted(Waiting):
        def __init__(self, name: str) -> None:
            super().__init__(6, 0.0)
            self.name = name

        def __getitem__(self, index: int) -> Tensor:
            if index == 0:
                begun.append(self.name)
            return super().__getitem__(index)

    found = epochs_of(*(DataLoader(Noted(name), batch_size=2) for name in ("one", "other")), rounds=2)
    assert begun == ["one", "other", "one", "other"]
    assert [[len(epoch) for epoch in one.came] for one in found] == [[3, 3], [3, 3]]
