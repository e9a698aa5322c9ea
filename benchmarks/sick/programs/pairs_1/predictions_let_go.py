"""Healthy: all predictions of an epoch are gathered and let go at its end: memory is a saw that comes back."""

import json

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, EPOCHS, STEPS_AN_EPOCH, SIZE = 64, 6, 100, 4096


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def resident_mib():
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * 4096 / 2**20


torch.manual_seed(0)
generator = torch.Generator().manual_seed(66)
basis = torch.randn(8, SIZE, generator=generator)
model = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, SIZE))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, highest, lowest = [], [], []
for epoch in range(EPOCHS):
    said, meant = (torch.empty(STEPS_AN_EPOCH, BATCH, SIZE) for _ in range(2))
    for i in range(STEPS_AN_EPOCH):
        clean = torch.randn(BATCH, 8, generator=generator) @ basis / 3
        again = model(clean + torch.randn(BATCH, SIZE, generator=generator))
        loss = mse_loss(again, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        said[i], meant[i] = again.detach(), clean
    highest.append(round(resident_mib()))
    worst = (said - meant).square_().mean((1, 2)).max().item()
    del said, meant
    lowest.append(round(resident_mib()))
    print(f"epoch {epoch} step {len(losses)} loss {losses[-1]:.4f} worst batch {worst:.4f}", flush=True)
truth(
    healthy=True,
    mib_before_release=highest,
    mib_after_release=lowest,
    variance=8 / 9,
    first=losses[0],
    late=sum(losses[-30:]) / 30,
)
