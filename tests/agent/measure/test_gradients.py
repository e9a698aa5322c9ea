"""What a run tells of its gradients: norms before clipping, layers, shares and numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch
from builders import until
from torch import nn
from truth import norm_of

from perfagent.boundary import guard


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def train(model, optimizer, steps=3, *, scale=1.0, then=lambda: None):
    """What of each gradient the norm is, a list a step. then: what the loop does before the optimizer's step."""
    seen = []
    for _ in range(steps):
        (scale * model(torch.randn(64, 8)).square().mean()).backward()
        seen.append([float(p.grad.norm()) for p in model.parameters() if p.grad is not None])
        then()
        optimizer.step()
        optimizer.zero_grad()
    return seen


def numbered(values, **options):
    return [(step, pytest.approx(value, **options)) for step, value in enumerate(values, start=1)]


# ---- clipping


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("measured", [True, False])
def test_gradients_clipped_before_unscaling_have_the_first_norm(record, measured, fused):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    recorded = record(model, overhead_budget_pct=1e9 if measured else 1e-9)
    true = []
    for _ in range(4):
        scaler.scale(model(torch.randn(4, 8)).square().mean()).backward()
        true.append(norm_of(model.parameters()) / 65536)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # a mistake users make: without unscale_
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert recorded.of("grad/norm") == numbered(true, rel=1e-5)
    assert recorded.of("grad/clipped_scaled") == [(step, 1.0) for step in (1, 2, 3, 4)]
    if measured:
        layers = [values for _, values in recorded.rows if "grad_norm/0.weight" in values]
        norms = [math.hypot(*(row[name] for name in row if name.startswith("grad_norm/"))) for row in layers]
        assert norms == pytest.approx(true[1:], rel=1e-5), "no optimizer is known at first"


def test_nan_is_counted_before_clipping_spreads_it(record):
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model, optimizer=optimizer)
    model(torch.randn(4, 8)).mean().backward()
    model[2].bias.grad.fill_(float("nan"))
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(p.grad.isnan().all() for p in model.parameters())
    optimizer.step()
    assert recorded.of("grad/nonfinite") == [(1, 1)]


# ---- layers, shares, counts


def test_every_layer_has_its_norm_in_every_step(everything):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorded = everything(model)
    seen = train(model, optimizer)
    for place, (name, _) in enumerate(model.named_parameters()):
        assert recorded.of(f"grad_norm/{name}") == numbered([row[place] for row in seen], rel=1e-6)
    assert all(0 < ratio < 1 for _, ratio in recorded.of("update/ratio"))
    assert [step for step, _ in recorded.of("update_ratio/0.weight")] == [1, 2, 3]
    assert [step for step, _ in recorded.of("dead/share")] == [2, 3], "the model is known after its first step"


def test_numbers_that_are_nan_or_inf_are_counted_by_parameter(everything):
    """Which parameters are bad is known a step later, and then they are counted."""
    model, told = small(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    recorded = everything(model)
    recorded.sender.reader.gradients.on_nonfinite = lambda step, names: told.append((step, names))
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
        model[2].weight.grad[0, :5] = float("nan")
        model[2].weight.grad[0, 5] = float("inf")
        optimizer.step()
        optimizer.zero_grad()
        nn.init.ones_(model[2].weight)
        until(lambda: recorded.rows.extend(recorded.sender.drain()) or not recorded.sender.rows)
    assert recorded.of("grad_nonfinite/2.weight") == [(2, 6.0)]
    assert told == [(1, ["2.weight"]), (2, ["2.weight"])]
    assert recorded.of("grad/nonfinite") == [(1, 1.0), (2, 1.0)]


# ---- when a pass runs


def test_passes_of_several_ranks_fall_on_the_same_steps(record, monkeypatch):
    """Two ranks whose passes cost differently still have steps in common: periods are powers of two, counted from 0."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    p = record(model).progress
    train(model, optimizer, 1)
    due = []
    for completed, step_ns in ((5, 10**15), (100, 1), (1030, 1)):  # every step, and one in a thousand
        p.completed = completed
        p.links.gradient_schedule.finish(optimizer, step_ns)
        due.append(p.measure_at)
    assert due == [6, 1024, 2048]


def test_a_device_without_room_for_a_pass_costs_that_pass_only(record, monkeypatch):
    """The allocation fails in the hook that counts the steps: it was turned off, and with it all that a run shows."""
    asked, model = [], small()

    def full(*_arguments, **_options):
        asked.append(recorded.progress.completed)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")

    monkeypatch.setattr(torch, "_foreach_norm", full)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model)
    train(model, optimizer, 4)
    assert not guard.failures
    recorded.progress.come_back()
    assert recorded.progress.measure_at >= 1000
    assert asked == [0], "each failure makes torch give back what it holds in reserve"
    assert [number for number, _ in recorded.steps()] == [1, 2, 3, 4]
