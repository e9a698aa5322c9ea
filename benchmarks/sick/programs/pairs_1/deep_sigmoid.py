"""Twelve sigmoid layers without normalization: the gradient loses a factor in each, and nothing is learned."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, DEPTH, WIDTH = 8, 128, 1000, 12, 320


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(21)
prototypes = torch.randn(CLASSES, 32, generator=generator)
layers, width = [], 32
for _ in range(DEPTH):
    layers += [nn.Linear(width, WIDTH), nn.Sigmoid()]
    width = WIDTH
model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses, norms, hits = [], None, 0
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    logits = model(prototypes[y] + 0.5 * torch.randn(BATCH, 32, generator=generator))
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    norms = [p.grad.norm().item() for p in model.parameters() if p.dim() == 2]
    hits += int((logits.argmax(1) == y).sum()) if step > STEPS - 100 else 0
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    guessing=math.log(CLASSES),
    late=sum(losses[-100:]) / 100,
    accuracy=hits / 100 / BATCH,
    first_gradient=norms[0],
    last_gradient=norms[-1],
)
