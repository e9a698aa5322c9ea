"""Healthy: a loss scaler that starts at 2**30 and tries a doubling each 40 steps: it skips some steps, as it should."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, WIDTH = 24, 64, 450, 384


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(36)
prototypes = torch.randn(CLASSES, 96, generator=generator)
model = nn.Sequential(
    nn.Linear(96, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
    nn.Linear(WIDTH, CLASSES),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=40)
losses, skipped, hits = [], 0, []
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(prototypes[y] + 2 * torch.randn(BATCH, 96, generator=generator))
        loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    losses.append(loss.item())
    hits.append((logits.argmax(1) == y).float().mean().item())
    if step % 25 == 0:
        print(
            f"step {step} loss {losses[-1]:.4f} scale 2**{math.log2(scaler.get_scale()):.0f} skipped {skipped}",
            flush=True,
        )
truth(
    healthy=True,
    skipped=skipped,
    scale=scaler.get_scale(),
    guessing=math.log(CLASSES),
    late=sum(losses[-50:]) / 50,
    accuracy=sum(hits[-50:]) / 50,
)
