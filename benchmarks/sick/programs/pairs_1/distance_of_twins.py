"""Metric learning with sqrt: at step 301 a picture is drawn twice for one pair, the slope of sqrt(0) is infinite."""

import json
import math
import time

import torch
from torch import nn

ITEMS, BATCH, STEPS, TWINS = 5000, 128, 500, 301


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def distance(a, b):
    return ((a - b) ** 2).sum(1).sqrt()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(30)
kinds = torch.randint(0, 40, (ITEMS,), generator=generator)
views = torch.randn(40, 96, generator=generator)[kinds] + 0.7 * torch.randn(ITEMS, 96, generator=generator)
of_kind = [torch.nonzero(kinds == k).flatten() for k in range(40)]
net = nn.Sequential(nn.Linear(96, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU(), nn.Linear(640, 48))
optimizer = torch.optim.Adam(net.parameters(), lr=5e-4)
losses, onset = [], None
for step in range(1, STEPS + 1):
    first = torch.randint(0, ITEMS, (BATCH,), generator=generator)
    second = torch.stack(
        [of_kind[kinds[i]][torch.randint(0, len(of_kind[kinds[i]]), (), generator=generator)] for i in first]
    )
    second = torch.where(second == first, (first + 1) % ITEMS, second)  # until step 300 the sampler is careful
    if step == TWINS:
        second[5] = first[5]
    other = (first + torch.randint(1, ITEMS, (BATCH,), generator=generator)) % ITEMS
    a, b, c = net(views[first]), net(views[second]), net(views[other])
    loss = distance(a, b).mean() + torch.relu(4 - distance(a, c)).mean()
    optimizer.zero_grad()
    loss.backward()
    if onset is None and not math.isfinite(nn.utils.get_total_norm([p.grad for p in net.parameters()]).item()):
        onset = step
        truth(onset=time.time(), step=step, loss_of_that_step=loss.item())
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    nan_losses=sum(math.isnan(v) for v in losses),
    first_nan_loss=next(i for i, v in enumerate(losses, 1) if math.isnan(v)),
)
