"""Healthy: returns of shares, of which a tenth can be known: the loss falls from 1.0 to 0.9 and rests there."""

import json

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, SIGNALS = 256, 700, 30


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def market(n, weights, generator):
    signals = torch.randn(n, SIGNALS, generator=generator)
    known = 0.1**0.5 * (signals @ weights)
    return signals, known + 0.9**0.5 * torch.randn(n, generator=generator), known


torch.manual_seed(0)
generator = torch.Generator().manual_seed(8)
weights = torch.randn(SIGNALS, generator=generator)
weights /= weights.norm()
model = nn.Sequential(nn.Linear(SIGNALS, 1024), nn.GELU(), nn.Linear(1024, 512), nn.GELU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
losses = []
for step in range(1, STEPS + 1):
    signals, returns, _ = market(BATCH, weights, generator)
    loss = mse_loss(model(signals).squeeze(1), returns)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step:4d}  mse {sum(losses[-50:]) / 50:.4f}  lr {schedule.get_last_lr()[0]:.1e}", flush=True)
with torch.no_grad():
    signals, returns, known = market(20_000, weights, generator)
    predicted = model(signals).squeeze(1)
truth(
    healthy=True,
    guessing=1.0,
    floor=0.9,
    late=sum(losses[-200:]) / 200,
    of_known_variance=1 - (mse_loss(predicted, known) / known.var()).item(),
)
