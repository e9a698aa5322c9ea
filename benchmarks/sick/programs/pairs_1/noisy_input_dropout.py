"""Healthy: three quarters of all inputs are dropped on purpose in small batches: a noisy loss, yet it falls."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, GENES = 12, 16, 900, 2000


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(17)
types = torch.rand(CLASSES, GENES, generator=generator)
model = nn.Sequential(
    nn.Dropout(0.75), nn.Linear(GENES, 512), nn.LayerNorm(512), nn.ReLU(), nn.Dropout(0.5), nn.Linear(512, CLASSES)
)


def cells(n):
    """Counts of genes in single cells, of twelve types of cell."""
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return torch.poisson(types[y] * 0.4, generator=generator), y


optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
losses = []
for step in range(1, STEPS + 1):
    x, y = cells(BATCH)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
model.eval()
with torch.no_grad():
    x, y = cells(2000)
    accuracy = (model(x).argmax(1) == y).float().mean().item()
truth(healthy=True, guessing=math.log(CLASSES), late=sum(losses[-100:]) / 100, accuracy=accuracy)
