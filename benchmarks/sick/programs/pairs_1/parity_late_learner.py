"""Healthy: the parity of five hidden bits of twenty: the loss stands at ln 2 for long, then falls to nothing."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

BITS, HIDDEN, BATCH, STEPS = 20, (2, 5, 8, 11, 17), 256, 1800


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
model = nn.Sequential(nn.Linear(BITS, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.01)
losses, accuracy = [], 0.0
for step in range(1, STEPS + 1):
    bits = torch.randint(0, 2, (BATCH, BITS), generator=generator).float()
    odd = bits[:, HIDDEN].sum(1) % 2
    logits = model(2 * bits - 1).squeeze(1)
    loss = binary_cross_entropy_with_logits(logits, odd)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    accuracy = ((logits > 0).float() == odd).float().mean().item()
    if step % 50 == 0:
        print(f"step {step} loss {sum(losses[-50:]) / 50:.4f} accuracy {accuracy:.3f}", flush=True)
flat = next((i for i, loss in enumerate(losses) if loss < 0.6), STEPS)
truth(healthy=True, guessing=math.log(2), flat_steps=flat, late=sum(losses[-50:]) / 50, accuracy=accuracy)
