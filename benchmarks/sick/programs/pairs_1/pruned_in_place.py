"""Healthy: pruning at step 301 sets most units to zero in place and keeps them there; the loss jumps and comes back."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, PRUNE = 192, 1600, 300


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def batch(generator, centers):
    y = torch.randint(0, 12, (BATCH,), generator=generator)
    kind = torch.randint(0, 6, (BATCH,), generator=generator)
    return centers[y, kind] + 0.8 * torch.randn(BATCH, 48, generator=generator), y


def keep_strongest(first, second, units):
    """Of a pair of layers only the hidden units with the largest weights stay, all others are zero from now on."""
    weak = torch.ones(first.out_features, dtype=torch.bool)
    weak[first.weight.norm(dim=1).topk(units).indices] = False
    with torch.no_grad():
        first.weight[weak], first.bias[weak], second.weight[:, weak] = 0.0, 0.0, 0.0
    return (~weak).float()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(15)
centers = torch.randn(12, 6, 48, generator=generator)
model = nn.Sequential(nn.Linear(48, 4096), nn.ReLU(), nn.Linear(4096, 12))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses, mask = [], None
for step in range(1, STEPS + 1):
    if step == PRUNE + 1:
        mask = keep_strongest(model[0], model[2], 160)
    x, y = batch(generator, centers)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if mask is not None:
        with torch.no_grad():
            model[0].weight.mul_(mask[:, None])
            model[0].bias.mul_(mask)
            model[2].weight.mul_(mask)
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    before_pruning=sum(losses[PRUNE - 50 : PRUNE]) / 50,
    just_after=max(losses[PRUNE : PRUNE + 10]),
    late=sum(losses[-50:]) / 50,
)
