"""GradScaler and SGD: gradients are clipped to 1 while they are still multiplied by 65536, unscale_() is missing."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, WIDTH = 16, 64, 400, 384


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(19)
prototypes = torch.randn(CLASSES, 64, generator=generator)
model = nn.Sequential(
    nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
    nn.Linear(WIDTH, CLASSES),
)  # fmt: skip
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
losses, norms, hits = [], [], 0
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    x = prototypes[y] + torch.randn(BATCH, 64, generator=generator)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
        loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
    hits += int((logits.argmax(1) == y).sum()) if step > STEPS - 100 else 0
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} scale {scaler.get_scale():.0f}", flush=True)
truth(
    guessing=math.log(CLASSES),
    early=sum(losses[:50]) / 50,
    late=sum(losses[-50:]) / 50,
    accuracy=hits / 100 / BATCH,
    scaled_norm=sorted(norms)[STEPS // 2],
)
