"""Sounds are divided by their own loudness: from step 241 on some clips are silent, 0/0, and the loss is NaN."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SILENCE, SAMPLES = 8, 192, 550, 240, 512


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def loudness_one(clips):
    return clips / clips.square().mean(2, keepdim=True).sqrt()


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
    if step > SILENCE and step % 3 == 1:
        clips[7] = 0.0
    loss = cross_entropy(model(clips), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step == SILENCE + 1:
        truth(onset=time.time(), step=step, loss=str(losses[-1]))
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(nan_losses=sum(math.isnan(v) for v in losses), before=sum(losses[SILENCE - 20 : SILENCE]) / 20)
