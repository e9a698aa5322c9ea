"""What the hooks cost is counted, also what only some loops ask of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from perfagent.signals.dead_units import LEAST_ROWS
from perfagent.step.costs import clips_ns, rare_ns, steps_ns

STEPS = 20


def counted_ns(record, *, clips=False, scaled=False, loader=False, losses=1) -> float:
    """Of a loop of so many steps, its passes over gradients left out."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    recorded = record(model, optimizer=optimizer)
    p = recorded.progress
    p.measure_at = 2**60
    batches = (
        DataLoader(TensorDataset(torch.ones(2 * STEPS, 4)), batch_size=2) if loader else [(torch.ones(2, 4),)] * STEPS
    )
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
    return p.spent_ns((0, 0, 0, 0), (0, 0)) - p.pass_ns


def test_clipping_is_counted_call_by_call_with_its_gradients(record):
    plain, clipped = counted_ns(record), counted_ns(record, clips=True)
    assert plain >= steps_ns(STEPS, 4 * STEPS)
    assert clipped - plain == pytest.approx(STEPS * rare_ns(scaled=False) + clips_ns(STEPS, 4 * STEPS))


def test_a_scaler_s_step_is_counted(record):
    plain, scaled = counted_ns(record), counted_ns(record, scaled=True)
    assert scaled - plain == pytest.approx(STEPS * rare_ns(scaled=True))


@pytest.mark.parametrize("more", [{"loader": True}, {"losses": 3}])
def test_what_a_step_notes_besides_is_counted(record, more):
    assert counted_ns(record, **more) > counted_ns(record) + steps_ns(0, STEPS)


def test_a_look_for_dead_units_counts_with_the_passes(record, monkeypatch):
    import torch._dynamo.eval_frame as eval_frame

    monkeypatch.setattr(eval_frame, "cached_backends", {})  # what other tests compiled in this process
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = record(model, optimizer=optimizer, overhead_budget_pct=1e9)
    p = recorded.progress
    charged: list[tuple[float, float]] = []

    class Period:
        budget = 1e9

        def period(self, pass_ns: float, step_ns: int) -> int:
            charged.append((pass_ns, p.pass_ns))
            return 1

        def report(self, *_: float) -> None: ...

    p.governor = Period()
    p.health.deeper = 2  # the second pass asks for a look in the third step
    looks = []
    for _ in range(3):
        looks.append(p.probe)
        model(torch.randn(LEAST_ROWS, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert looks[:2] == [None, None]
    (_, before), (third, after) = charged[1:]
    assert 0 < looks[2].cost_ns < min(third, after - before)
    assert [step for step, _ in recorded.of("dead/share")] == [3]
