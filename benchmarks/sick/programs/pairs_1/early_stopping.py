"""Healthy: early stopping ends the run long before the planned steps, with exit code 0."""

import json
import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, PLANNED, CHECK, PATIENCE, SIZE = 7, 96, 3000, 60, 5, 64


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(73)
kinds = torch.randn(CLASSES, SIZE, generator=generator)


def rows(n):
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return kinds[y] + 2.5 * torch.randn(n, SIZE, generator=generator), y


model = nn.Sequential(nn.Linear(SIZE, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
x_val, y_val = rows(4000)
losses, best, checks = [], float("inf"), 0
for step in range(1, PLANNED + 1):
    x, y = rows(BATCH)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % CHECK == 0:
        with torch.no_grad():
            val = cross_entropy(model(x_val), y_val).item()
        checks = 0 if val < best - 5e-4 else checks + 1
        best = min(best, val)
        print(f"step {step} of {PLANNED} loss {losses[-1]:.4f} val {val:.4f} without a better one {checks}", flush=True)
        if checks == PATIENCE:
            print("early stopping", flush=True)
            truth(
                healthy=True,
                stopped_at=step,
                planned=PLANNED,
                guessing=1.946,
                late=sum(losses[-50:]) / 50,
                best_val=best,
            )
            sys.exit(0)
truth(healthy=False)
