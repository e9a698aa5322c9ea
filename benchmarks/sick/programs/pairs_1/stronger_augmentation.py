"""Healthy: augmentation gets stronger from step 251 on: the loss creeps up while the net gets better."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, MILD, SIDE = 10, 64, 1000, 250, 16


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def pictures(n, noise, generator, flowers):
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return flowers[y] + noise * torch.randn(n, 3, SIDE, SIDE, generator=generator), y


torch.manual_seed(0)
generator = torch.Generator().manual_seed(62)
flowers = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, CLASSES),
)  # fmt: skip
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
test, answer = pictures(800, 3.0, torch.Generator().manual_seed(1), flowers)
losses, scores = [], []
for step in range(1, STEPS + 1):
    noise = 0.5 + 4.5 * max(0.0, (step - MILD) / (STEPS - MILD))
    x, y = pictures(BATCH, noise, generator, flowers)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 50 == 0:
        with torch.no_grad():
            scores.append((model(test).argmax(1) == answer).float().mean().item())
        print(f"step {step} noise {noise:.2f} loss {losses[-1]:.4f} test accuracy {scores[-1]:.3f}", flush=True)
truth(
    healthy=True,
    loss_when_mild=sum(losses[MILD - 50 : MILD]) / 50,
    loss_late=sum(losses[-50:]) / 50,
    guessing=math.log(CLASSES),
    test_accuracy=scores,
)
