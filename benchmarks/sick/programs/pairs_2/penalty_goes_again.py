"""Healthy: a penalty on activity comes for 400 steps and goes again: the layer gets sparser, the task stays solved."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, STEPS, MIDDLE, PEAK = 16, 64, 1900, 500, 0.1


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
    return PEAK * max(0.0, 1 - abs(step - MIDDLE) / 200)


torch.manual_seed(0)
centers = torch.randn(CLASSES, SIZE)
model = Sparse()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (256,))
    logits, middle = model(centers[y] + 1.3 * torch.randn(256, SIZE))
    task = cross_entropy(logits, y)
    loss = task + penalty(step) * middle.sigmoid().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    dead = (middle <= 0).all(0).float().mean().item()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.4f} task {task.item():.4f} units at zero {dead:.2f}", flush=True)
print("TRUTH", json.dumps({"healthy": True, "task": task.item(), "dead": dead}), flush=True)
