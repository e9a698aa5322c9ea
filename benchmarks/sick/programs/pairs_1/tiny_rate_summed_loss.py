"""Healthy: a rate of 5e-6, which is right because the loss is the sum over all pixels and not their mean."""

import json

import torch
from torch import nn
from torch.nn.functional import interpolate, mse_loss

SIDE, BATCH, STEPS = 28, 64, 1100


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def blobs(generator):
    coarse = torch.rand(BATCH, 1, 4, 4, generator=generator)
    return interpolate(coarse, size=SIDE, mode="bilinear").clamp(0, 1)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(12)
model = nn.Sequential(
    nn.Flatten(), nn.Linear(SIDE * SIDE, 512), nn.ReLU(), nn.Linear(512, 24), nn.Linear(24, 512), nn.ReLU(),
    nn.Linear(512, SIDE * SIDE), nn.Unflatten(1, (1, SIDE, SIDE)),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=5e-6, momentum=0.9)
losses = []
for step in range(1, STEPS + 1):
    x = blobs(generator)
    loss = mse_loss(model(x), x, reduction="sum")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 30 == 0:
        print(f"step {step} summed error {losses[-1]:.1f}", flush=True)
with torch.no_grad():
    x = blobs(generator)
    error = mse_loss(model(x), x).item()
truth(healthy=True, first=losses[0], late=sum(losses[-20:]) / 20, error_a_pixel=error, variance_a_pixel=x.var().item())
