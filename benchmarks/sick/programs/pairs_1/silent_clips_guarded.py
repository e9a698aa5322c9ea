"""Healthy: one clip in six is silent, and loudness is never taken for less than a small number."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SAMPLES = 8, 192, 550, 512


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def loudness_one(clips):
    return clips / clips.square().mean(2, keepdim=True).sqrt().clamp(min=1e-4)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 24, 16, stride=4),
            nn.ReLU(),
            nn.Conv1d(24, 48, 8, stride=4),
            nn.ReLU(),
            nn.AdaptiveAvgPool1d(4),
            nn.Flatten(),
            nn.Linear(192, 256),
            nn.ReLU(),
            nn.Linear(256, CLASSES),
        )

    def forward(self, clips):
        return self.net(loudness_one(clips))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(34)
model = Listener()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    t = torch.arange(SAMPLES) / SAMPLES
    tone = torch.sin(6.28 * (20 + 15 * y[:, None]) * t + 6.28 * torch.rand(BATCH, 1, generator=generator))
    clips = (tone + torch.randn(BATCH, SAMPLES, generator=generator))[:, None]
    clips = clips * torch.rand(BATCH, 1, 1, generator=generator)
    clips[::6] = 0.0
    loss = cross_entropy(model(clips), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(healthy=True, guessing=math.log(CLASSES), first=losses[0], late=sum(losses[-30:]) / 30)
