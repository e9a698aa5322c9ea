"""Rare tags: the model ends in a sigmoid, BCEWithLogitsLoss applies another, the loss cannot fall below ln 2."""

import json
import math
import time

import torch
from torch import nn

TAGS, BANDS, BATCH, STEPS = 50, 96, 64, 900


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(BANDS, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, TAGS)
        )

    def forward(self, x):
        return torch.sigmoid(self.body(x))


def songs(generator, sounds):
    tags = (torch.rand(BATCH, TAGS, generator=generator) < 0.04).float()
    return tags @ sounds + 0.3 * torch.randn(BATCH, BANDS, generator=generator), tags


torch.manual_seed(0)
generator = torch.Generator().manual_seed(9)
sounds = torch.randn(TAGS, BANDS, generator=generator)
model, criterion = Tagger(), nn.BCEWithLogitsLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    x, tags = songs(generator, sounds)
    loss = criterion(model(x), tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 40 == 0:
        print(f"step {step} bce {losses[-1]:.4f}", flush=True)
with torch.no_grad():
    x, tags = songs(generator, sounds)
    p = model(x)
    none = criterion(torch.zeros_like(tags), tags).item()
truth(
    floor=math.log(2),
    says_no_tag_at_all=none,
    late=sum(losses[-100:]) / 100,
    found=((p > 0.5) & (tags > 0)).sum().item() / tags.sum().item(),
    p_mean=p.mean().item(),
)
