"""ExponentialLR with gamma 1.012 where 0.988 was meant, in each batch: it goes well until the rate is too high."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, JOINTS = 160, 900, 7


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def arm(angles):
    """Where the tip of an arm of seven links is."""
    total = angles.cumsum(1)
    return torch.stack([total.cos().sum(1), total.sin().sum(1)], 1) / JOINTS**0.5


torch.manual_seed(0)
generator = torch.Generator().manual_seed(22)
model = nn.Sequential(
    nn.Linear(JOINTS, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 2)
)
optimizer = torch.optim.SGD(model.parameters(), lr=2e-3, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.012)
losses, onset, best = [], None, float("inf")
for step in range(1, STEPS + 1):
    angles = 2 * torch.rand(BATCH, JOINTS, generator=generator) - 1
    loss = mse_loss(model(angles), arm(angles))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    recent = sum(losses[-10:]) / len(losses[-10:])
    best = min(best, recent)
    if onset is None and step > 50 and recent > 3 * best:
        onset = step
        truth(onset=time.time(), step=step, lr=schedule.get_last_lr()[0])
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.5f}", flush=True)
truth(
    best=best,
    late=sum(losses[-50:]) / 50,
    last_lr=schedule.get_last_lr()[0],
    variance=arm(2 * torch.rand(4000, JOINTS) - 1).var().item(),
)
