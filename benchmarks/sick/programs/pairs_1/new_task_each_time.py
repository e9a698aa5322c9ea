"""Healthy: the task changes each 120 steps: the loss jumps up each time and falls again."""

import json

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, TASKS, STEPS_A_TASK = 256, 7, 120


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(29)
shared = torch.randn(16, 10, generator=generator)
body = nn.Sequential(nn.Linear(16, 768), nn.GELU(), nn.Linear(768, 512), nn.GELU())
head = nn.Linear(512, 4)
optimizer = torch.optim.AdamW([*body.parameters(), *head.parameters()], lr=5e-4)
step, curves = 0, []
for task in range(TASKS):
    readout = torch.randn(10, 4, generator=generator)
    losses = []
    for _ in range(STEPS_A_TASK):
        step += 1
        x = torch.randn(BATCH, 16, generator=generator)
        loss = mse_loss(head(body(x)), (x @ shared / 4).tanh() @ readout / 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 30 == 0:
            print(f"task {task} step {step} mse {loss.item():.4f}", flush=True)
    curves.append(losses)
truth(
    healthy=True,
    at_start_of_task=[round(c[0], 3) for c in curves],
    after_40=[round(c[40], 4) for c in curves],
    at_end_of_task=[round(c[-1], 4) for c in curves],
)
