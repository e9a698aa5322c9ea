"""Healthy: gradients are clipped to a norm of 1e-3, which is no harm because Adam divides by their size again."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

PHONES, FRAMES, BATCH, STEPS, MELS = 30, 32, 16, 1900, 40


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Phones(nn.Module):
    """Which sound is spoken in each frame."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(MELS, 192, 5, padding=2), nn.GELU(), nn.Conv1d(192, 192, 5, padding=2), nn.GELU(),
            nn.Conv1d(192, PHONES, 1),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(20)
spectra = torch.randn(PHONES, MELS, generator=generator)
model = Phones()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-12)
losses, norms, hits = [], [], 0
for step in range(1, STEPS + 1):
    y = torch.randint(0, PHONES, (BATCH, FRAMES // 4), generator=generator).repeat_interleave(4, 1)
    x = spectra[y].transpose(1, 2) + 2.5 * torch.randn(BATCH, MELS, FRAMES, generator=generator)
    logits = model(x)
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3).item())
    optimizer.step()
    losses.append(loss.item())
    hits += int((logits.argmax(1) == y).sum()) if step > STEPS - 100 else 0
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} norm {norms[-1]:.3f} (clipped to 0.001)", flush=True)
truth(healthy=True, guessing=math.log(PHONES), late=sum(losses[-50:]) / 50, accuracy=hits / 100 / BATCH / FRAMES)
