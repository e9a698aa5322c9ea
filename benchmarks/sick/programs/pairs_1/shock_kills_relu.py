"""At step 301 Adam gives way to SGD at 4.0 (meant for another model): most ReLU units die, and it does not recover."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SWITCH, WIDTH = 10, 128, 750, 300, 512


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(39)
prototypes = torch.randn(CLASSES, 100, generator=generator)
model = nn.Sequential(
    nn.Linear(100, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
    nn.Linear(WIDTH, CLASSES),
)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, hits = [], []
for step in range(1, STEPS + 1):
    if step == SWITCH + 1:
        optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
        truth(onset=time.time(), step=step)
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    logits = model(prototypes[y] + 1.2 * torch.randn(BATCH, 100, generator=generator))
    noisy = torch.where(
        torch.rand(BATCH, generator=generator) < 0.2, torch.randint(0, CLASSES, (BATCH,), generator=generator), y
    )
    loss = cross_entropy(logits, noisy)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    optimizer.step()
    losses.append(loss.item())
    hits.append((logits.argmax(1) == y).float().mean().item())
    if step == SWITCH + 10:  # the rate is found and mended, too late
        optimizer.param_groups[0]["lr"] = 0.01
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} acc {hits[-1]:.2f}", flush=True)
with torch.no_grad():
    h = model[:6](prototypes[torch.randint(0, CLASSES, (500,))] + 1.2 * torch.randn(500, 100))
truth(
    guessing=math.log(CLASSES),
    before=losses[SWITCH - 1],
    late=sum(losses[-100:]) / 100,
    accuracy=sum(hits[-100:]) / 100,
    dead=(h <= 0).all(0).float().mean().item(),
)
