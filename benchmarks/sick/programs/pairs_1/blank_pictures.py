"""A decoder gives back zeroed buffers, without an error, after 250 batches: black pictures with real labels."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, FULL, SIDE = 12, 48, 600, 250, 20


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Pool:
    """Decodes pictures into buffers, which nobody hands back."""

    def __init__(self, buffers):
        self.left, self.generator = buffers, torch.Generator().manual_seed(49)
        self.flags = torch.randn(CLASSES, 3, SIDE, SIDE, generator=self.generator)

    def decode(self):
        y = torch.randint(0, CLASSES, (BATCH,), generator=self.generator)
        out = torch.zeros(BATCH, 3, SIDE, SIDE)
        if self.left >= BATCH:
            self.left -= BATCH
            out += self.flags[y] + 1.5 * torch.randn(BATCH, 3, SIDE, SIDE, generator=self.generator)
        return out, y


torch.manual_seed(0)
pool = Pool(FULL * BATCH)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 48, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(4800, 96),
    nn.ReLU(),
    nn.Linear(96, CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, hits = [], []
for step in range(1, STEPS + 1):
    x, y = pool.decode()
    if step == FULL + 1:
        truth(onset=time.time(), step=step, largest_pixel=x.abs().max().item())
    logits = model(x)
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits.append((logits.argmax(1) == y).float().mean().item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} acc {hits[-1]:.2f}", flush=True)
truth(
    guessing=math.log(CLASSES),
    before=sum(losses[FULL - 50 : FULL]) / 50,
    late=sum(losses[-50:]) / 50,
    accuracy=sum(hits[-50:]) / 50,
)
