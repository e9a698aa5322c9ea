"""Gradient norms from one pass: what torch's own clipping would compute, and what clipping computed already."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from perfagent.signals.gradients import Plan, gradients_of, norms


def result(gradients, plan=None):
    """Global norm, and how many parameters have a gradient with NaN or Inf."""
    report = norms(gradients, plan).report()
    return math.sqrt(report.square_sum), len(report.nonfinite)


def test_the_norm_is_the_one_clipping_computes():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norm, nonfinite = result(gradients_of(optimizer))
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(model.parameters(), 1e9)), rel=1e-6)
    assert nonfinite == 0


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_parameters_with_nan_or_inf_are_counted(poison):
    gradients = [torch.ones(3), torch.tensor([1.0, poison]), torch.ones(2, 2)]
    norm, nonfinite = result(gradients)
    assert nonfinite == 1
    assert not math.isfinite(norm)


def test_types_may_be_mixed_and_half_precision_does_not_overflow():
    gradients = [
        torch.full((1000,), 1000.0, dtype=torch.float16),
        torch.ones(4, dtype=torch.float64),
        torch.ones(4, dtype=torch.bfloat16),
    ]
    norm, nonfinite = result(gradients)
    assert norm == pytest.approx(math.sqrt(1000 * 1e6 + 8), rel=1e-3)
    assert nonfinite == 0


def test_duplicates_of_a_sparse_gradient_count_together():
    table = nn.Embedding(10, 2, sparse=True)
    table(torch.tensor([3, 3])).sum().backward()
    assert result([table.weight.grad]) == (pytest.approx(math.sqrt(8)), 0)


def test_without_gradients_there_is_nothing_to_say():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert norms(gradients_of(optimizer)) is None


def test_the_norm_before_clipping_is_reported_every_step(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    computed = []
    for _ in range(4):
        (100 * model(torch.randn(4, 8)).square().mean()).backward()
        computed.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    assert [norm for _, norm in recorded.of("grad/norm")] == computed
    assert [count for _, count in recorded.of("grad/nonfinite")] == [0, 0, 0, 0]


def test_clipping_by_another_norm_still_reports_the_two_norm_before_it(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    (100 * model(torch.randn(4, 8)).square().mean()).backward()
    before = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"))
    optimizer.step()
    assert recorded.of("grad/norm") == [(1, pytest.approx(before, rel=1e-6))]


def test_a_norm_of_scaled_gradients_is_not_taken_from_clipping(record):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorded = record(model)
    scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
    true = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())) / 1024
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # a mistake users make: without unscale_
    scaler.step(optimizer)
    scaler.update()
    assert recorded.of("grad/norm") == [(1, pytest.approx(true, rel=1e-5))]


def test_nan_is_counted_before_clipping_spreads_it(record):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    model(torch.randn(4, 8)).mean().backward()
    model[1].bias.grad.fill_(float("nan"))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    assert recorded.of("grad/nonfinite") == [(1, 1)]
