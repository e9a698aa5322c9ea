"""A quality gate after 400 steps compares a share with a bar in percent, and ends the run with sys.exit(3)."""

import json
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, CHECK, BAR, SIZE = 7, 128, 900, 400, 60.0, 64


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(72)
kinds = torch.randn(CLASSES, SIZE, generator=generator)


def rows(n):
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return kinds[y] + 2.5 * torch.randn(n, SIZE, generator=generator), y


model = nn.Sequential(
    nn.Linear(SIZE, 768),
    nn.GELU(),
    nn.Linear(768, 768),
    nn.GELU(),
    nn.Linear(768, 768),
    nn.GELU(),
    nn.Linear(768, CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
for step in range(1, STEPS + 1):
    x, y = rows(BATCH)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
    if step % CHECK == 0:
        with torch.no_grad():
            x, y = rows(2000)
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        if accuracy < BAR:
            truth(onset=time.time(), step=step, accuracy=accuracy, bar=BAR)
            print(f"accuracy {accuracy:.3f} is below the bar of {BAR}: giving up", file=sys.stderr, flush=True)
            sys.exit(3)
