"""Healthy: sensors drop out, a quarter of all inputs and targets are NaN, and are left out by index before use."""

import json

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, SENSORS, WINDOW = 96, 600, 12, 16


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def windows(generator):
    """Inputs and the next values, with NaN where a sensor had dropped out."""
    phase = 6.28 * torch.rand(BATCH, SENSORS, 1, generator=generator)
    t = 0.3 * torch.arange(WINDOW + 1) * torch.linspace(0.5, 2, SENSORS)[:, None]
    series = torch.sin(t + phase) + 0.05 * torch.randn(BATCH, SENSORS, WINDOW + 1, generator=generator)
    series[torch.rand(series.shape, generator=generator) < 0.25] = float("nan")
    return series[:, :, :-1], series[:, :, -1]


torch.manual_seed(0)
generator = torch.Generator().manual_seed(38)
model = nn.Sequential(
    nn.Linear(2 * SENSORS * WINDOW, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, SENSORS)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses = []
for step in range(1, STEPS + 1):
    x, y = windows(generator)
    known = x.isfinite()
    predicted = model(torch.cat([x.nan_to_num(0.0), known.float()], 1).flatten(1))
    there = y.isfinite()
    loss = mse_loss(predicted[there], y[there])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} mse {losses[-1]:.4f} targets missing {1 - there.float().mean():.2f}", flush=True)
truth(
    healthy=True, variance=y[there].var().item(), missing=1 - there.float().mean().item(), late=sum(losses[-50:]) / 50
)
