"""Gestures with a GRU: zero_grad() was moved between backward() and step(), no gradient ever reaches Adam."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

GESTURES, LENGTH, SENSORS, BATCH, STEPS = 6, 40, 9, 64, 500


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(SENSORS, 96, num_layers=2, batch_first=True)
        self.head = nn.Linear(96, GESTURES)

    def forward(self, x):
        return self.head(self.rnn(x)[0].mean(1))


def record(generator):
    y = torch.randint(0, GESTURES, (BATCH,), generator=generator)
    time_axis = torch.linspace(0, 6.28, LENGTH)
    wave = torch.sin(time_axis * (1 + y[:, None]))[..., None] * torch.linspace(0.5, 1.5, SENSORS)
    return wave + torch.randn(BATCH, LENGTH, SENSORS, generator=generator), y


torch.manual_seed(0)
generator = torch.Generator().manual_seed(7)
model = Recognizer()
before = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, hits = [], 0
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    x, y = record(generator)
    logits = model(x)
    loss = cross_entropy(logits, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.zero_grad()
    optimizer.step()
    losses.append(loss.item())
    hits += int((logits.argmax(1) == y).sum())
    if step % 50 == 0:
        print(f"iter {step:4d}: loss {losses[-1]:.3f}, accuracy so far {hits / step / BATCH:.3f}", flush=True)
truth(
    guessing=math.log(GESTURES),
    late=sum(losses[-100:]) / 100,
    accuracy=hits / STEPS / BATCH,
    unchanged=sum(bool((a == b).all()) for a, b in zip(before, model.parameters(), strict=True)),
    parameters=len(before),
)
