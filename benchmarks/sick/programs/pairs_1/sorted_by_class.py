"""The file is sorted by class and not shuffled: sixty steps of each animal, after which all others are forgotten."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

CLASSES, ROWS_A_CLASS, BATCH, EPOCHS, SIDE = 10, 5760, 96, 1, 18


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(47)
animals = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
y = torch.arange(CLASSES).repeat_interleave(ROWS_A_CLASS)
x = animals[y] + 1.5 * torch.randn(len(y), 3, SIDE, SIDE, generator=generator)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=False)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 81, 64),
    nn.ReLU(),
    nn.Linear(64, CLASSES),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.004, momentum=0.9)
losses, step = [], 0
truth(onset=time.time(), step=61)
for _ in range(EPOCHS):
    for xb, yb in loader:
        step += 1
        loss = cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 30 == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
with torch.no_grad():
    some = torch.arange(0, len(y), 16)
    accuracy = (model(x[some]).argmax(1) == y[some]).float().mean().item()
borders = [i for i, v in enumerate(losses) if v > 2 and i % 60 == 0]
truth(
    accuracy_on_all=accuracy,
    guessing=1 / CLASSES,
    jumps_at=borders,
    loss_at_jumps=[round(losses[i], 2) for i in borders],
    last=losses[-1],
)
