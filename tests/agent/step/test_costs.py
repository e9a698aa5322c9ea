"""What the hooks cost is counted, also what only some loops ask of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfagent.step.costs import clips_ns, occasional_ns, steps_ns

STEPS = 20


def counted_ns(record, *, clips=False, scaled=False, loader=False, losses=1) -> float:
    """Of a loop of so many steps, what is timed left out: passes over gradients, looks into batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    recorded = record(model, optimizer=optimizer)
    p = recorded.progress
    p.measure_at = 2**60
    data = DataLoader(TensorDataset(torch.ones(2 * STEPS, 4)), batch_size=2)
    batches = data if loader else [(torch.ones(2, 4),)] * STEPS
    for (batch,) in batches:
        for _ in range(losses):
            scaler.scale(model(batch).square().mean()).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    recorded.finish()
    return p.spent_ns((0, 0, 0, 0)) - p.costs.pass_ns - p.costs.batches_ns


def test_what_only_some_loops_ask_for_is_counted(record):
    plain, clipped, scaled = counted_ns(record), counted_ns(record, clips=True), counted_ns(record, scaled=True)
    assert plain >= steps_ns(STEPS, 4 * STEPS)
    assert clipped - plain == pytest.approx(STEPS * occasional_ns(scaled=False) + clips_ns(STEPS, 4 * STEPS))
    assert scaled - plain == pytest.approx(STEPS * occasional_ns(scaled=True))
    for more in ({"loader": True}, {"losses": 3}):
        assert counted_ns(record, **more) > plain + steps_ns(0, STEPS)
