from __future__ import annotations

import torch

from perfagent_tools.bench.measuring import bytes_of, peak_bytes

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
