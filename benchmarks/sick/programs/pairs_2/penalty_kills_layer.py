"""A penalty on activity grows without end where it should stop: the middle layer dies unit by unit, and the task with it."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, STEPS, BEGINS, DOUBLES = 16, 64, 1900, 300, 80


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.early = nn.Sequential(nn.Linear(SIZE, 256), nn.ReLU())
        self.middle = nn.Linear(256, 256)
        self.late = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))

    def forward(self, x):
        middle = self.middle(self.early(x))
        return self.late(middle.relu()), middle


def penalty(step):
    """On the share of units at work, softly counted."""
    return 0.05 * 2 ** ((step - BEGINS) / DOUBLES) if step > BEGINS else 0.0


torch.manual_seed(0)
centers = torch.randn(CLASSES, SIZE)
model = Sparse()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
told = False
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (256,))
    logits, middle = model(centers[y] + 1.3 * torch.randn(256, SIZE))
    task = cross_entropy(logits, y)
    loss = task + penalty(step) * middle.sigmoid().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dead = (middle <= 0).all(0).float().mean().item()
    if dead > 0.5 and not told:
        print("TRUTH", json.dumps({"onset": time.time(), "step": step, "guessing": math.log(CLASSES)}), flush=True)
        told = True
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f} task {task.item():.4f} units at zero {dead:.2f}", flush=True)
