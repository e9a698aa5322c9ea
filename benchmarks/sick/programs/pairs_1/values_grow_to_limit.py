"""Healthy: temporal differences: the loss is a saw with each copy of the net, until the values are at their limit."""

import copy
import json

import torch
from torch import nn
from torch.nn.functional import mse_loss

RATE, BATCH, STEPS, GOODS = 0.05, 192, 1500, 12
DISCOUNT = 1 / (1 + RATE)


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def tomorrow(stock, generator):
    """What is there after a day, and what the day earned."""
    bought = 2 * torch.rand(stock.shape, generator=generator)
    return 0.6 * stock + 0.4 * bought, (0.4 * stock - 0.2 * bought).mean(1)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(61)
value = nn.Sequential(nn.Linear(GOODS, 720), nn.SiLU(), nn.Linear(720, 720), nn.SiLU(), nn.Linear(720, 1))
frozen = copy.deepcopy(value).requires_grad_(False)
optimizer = torch.optim.Adam(value.parameters(), lr=5e-4)
losses, values = [], []
for step in range(1, STEPS + 1):
    stock = 2 * torch.rand(BATCH, GOODS, generator=generator)
    left, earned = tomorrow(stock, generator)
    target = earned + DISCOUNT * frozen(left).squeeze(1)
    now = value(stock).squeeze(1)
    loss = mse_loss(now, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 15 == 0:
        frozen.load_state_dict(value.state_dict())
    losses.append(loss.item())
    values.append(now.mean().item())
    if step % 25 == 0:
        print(f"step {step} td loss {losses[-1]:.5f} value {values[-1]:.3f}", flush=True)
windows = [sum(losses[i : i + 50]) / 50 for i in range(0, STEPS, 50)]
truth(
    healthy=True,
    windows=[round(w, 5) for w in windows],
    value_last=values[-1],
    values=[round(v, 2) for v in values[::100]],
)
