"""A port from a framework where 0.98 was the share to keep: nn.Dropout(0.98) drops all but one unit in fifty."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, unfold

CLASSES, BATCH, STEPS, SIDE = 10, 48, 750, 16


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class PatchMixer(nn.Module):
    def __init__(self, width=96, keep=0.98, depth=3):
        super().__init__()
        self.embed = nn.Linear(3 * 16, width)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(keep),
                    nn.Linear(2 * width, width), nn.Dropout(keep),
                )
                for _ in range(depth)
            )
        )  # fmt: skip
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        patches = unfold(x, 4, stride=4).transpose(1, 2)
        return self.head(self.blocks(self.embed(patches)).mean(1))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(16)
prototypes = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
model = PatchMixer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
losses, hits = [], 0
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    x = prototypes[y] + 0.7 * torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
    logits = model(x)
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits += int((logits.argmax(1) == y).sum()) if step > STEPS - 100 else 0
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(guessing=math.log(CLASSES), late=sum(losses[-100:]) / 100, accuracy=hits / 100 / BATCH)
