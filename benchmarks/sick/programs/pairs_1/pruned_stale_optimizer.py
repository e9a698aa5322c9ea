"""Pruning at step 301 replaces the weights by new Parameters: SGD goes on with the old ones, nothing is learned."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, PRUNE = 192, 3600, 300


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def batch(generator, centers):
    y = torch.randint(0, 12, (BATCH,), generator=generator)
    kind = torch.randint(0, 6, (BATCH,), generator=generator)
    return centers[y, kind] + 0.8 * torch.randn(BATCH, 48, generator=generator), y


def keep_strongest(first, second, units):
    """Of a pair of layers only the hidden units with the largest weights stay."""
    best = first.weight.norm(dim=1).topk(units).indices
    first.weight, first.bias = nn.Parameter(first.weight[best].detach()), nn.Parameter(first.bias[best].detach())
    second.weight = nn.Parameter(second.weight[:, best].detach())
    second.bias = nn.Parameter(second.bias.detach().clone())


torch.manual_seed(0)
generator = torch.Generator().manual_seed(15)
centers = torch.randn(12, 6, 48, generator=generator)
model = nn.Sequential(nn.Linear(48, 4096), nn.ReLU(), nn.Linear(4096, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for step in range(1, STEPS + 1):
    if step == PRUNE + 1:
        keep_strongest(model[0], model[2], 160)
        before = [p.detach().clone() for p in model.parameters()]
        truth(onset=time.time(), step=step)
    x, y = batch(generator, centers)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 100 == 0:
        print(f"step {step} loss {losses[-1]:.4f} units {model[0].out_features}", flush=True)
truth(
    before_pruning=sum(losses[PRUNE - 50 : PRUNE]) / 50,
    just_after=sum(losses[PRUNE : PRUNE + 50]) / 50,
    late=sum(losses[-50:]) / 50,
    unchanged=sum(bool((a == b).all()) for a, b in zip(before, model.parameters(), strict=True)),
)
