"""Rotations: the loss is the acos of a cosine, which is exactly 1 once the net is good: an infinite slope."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import normalize

BATCH, STEPS = 96, 1800


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Direction(nn.Module):
    """Guesses a direction from noisy projections of it, as a unit vector."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 384),
            nn.SiLU(),
            nn.Linear(384, 384),
            nn.SiLU(),
            nn.Linear(384, 384),
            nn.SiLU(),
            nn.Linear(384, 3),
        )

    def forward(self, x):
        return normalize(self.net(x), dim=1)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(32)
sensors = torch.randn(3, 12, generator=generator)
model = Direction()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
losses, onset = [], None
for step in range(1, STEPS + 1):
    true = normalize(torch.randn(BATCH, 3, generator=generator), dim=1)
    cosine = (model(true @ sensors + 0.02 * torch.randn(BATCH, 12, generator=generator)) * true).sum(1).clamp(-1.0, 1.0)
    loss = torch.acos(cosine).mean()
    optimizer.zero_grad()
    loss.backward()
    if onset is None and not all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        onset = step
        truth(onset=time.time(), step=step, loss_of_that_step=loss.item(), cosines_of_one=int((cosine >= 1).sum()))
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} angle {math.degrees(losses[-1]):.3f} degrees", flush=True)
truth(nan_losses=sum(math.isnan(v) for v in losses), before=losses[max(0, (onset or 1) - 2)])
