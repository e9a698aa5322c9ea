from __future__ import annotations

import torch

from perfagent.bench.measuring import bytes_of, in_turn, medians, peak_bytes

CPU = torch.device("cpu")
MIB = 2**20


def test_the_peak_counts_what_forward_kept_for_backward() -> None:
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


def test_every_way_is_called_once_a_round_but_the_first() -> None:
    calls: list[str] = []
    found = in_turn({name: lambda name=name: calls.append(name) for name in ("a", "b")}, CPU, rounds=3)
    assert (calls.count("a"), calls.count("b")) == (4, 4)
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}
    assert all({calls[2 * number], calls[2 * number + 1]} == {"a", "b"} for number in range(4))
    assert medians({"a": [3.0, 1.0, 2.0]}) == {"a": 2.0}
