"""Healthy: distillation from a soft teacher: the cross-entropy ends at the entropy of its answers, far above zero."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS = 100, 96, 900


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(10)
teacher = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, CLASSES)).eval().requires_grad_(False)
teacher[0].weight.mul_(3)
teacher[2].weight.mul_(2)
student = nn.Sequential(nn.Linear(64, 768), nn.GELU(), nn.Linear(768, 512), nn.GELU(), nn.Linear(512, CLASSES))
optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=STEPS)
losses, gaps = [], []
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 64, generator=generator)
    soft = teacher(x).softmax(1)
    loss = cross_entropy(student(x), soft)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.item())
    gaps.append(losses[-1] + (soft * soft.log()).sum(1).mean().item())
    if step % 40 == 0:
        print(f"step {step} distillation loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    uniform=math.log(CLASSES),
    late=sum(losses[-50:]) / 50,
    divergence_first=sum(gaps[:10]) / 10,
    divergence_late=sum(gaps[-50:]) / 50,
)
