"""Healthy: one cycle with a peak rate at the edge of what the net can bear: the loss has a hump, and ends low."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, CLASSES = 160, 900, 10


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 32, 7, stride=2), nn.ReLU(), nn.Conv1d(32, 64, 5, stride=2), nn.ReLU(),
            nn.Conv1d(64, 64, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(256, CLASSES),
        )  # fmt: skip

    def forward(self, x):
        return self.net(x)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(23)
shapes = torch.randn(CLASSES, 16, generator=generator)
shapes = nn.functional.interpolate(shapes[:, None], size=128, mode="linear")
model = Waves()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=STEPS, pct_start=0.4, div_factor=30)
losses, rates = [], []
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    loss = cross_entropy(model(shapes[y] + 1.5 * torch.randn(BATCH, 1, 128, generator=generator)), y)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    rates.append(schedule.get_last_lr()[0])
    schedule.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {sum(losses[-25:]) / 25:.4f} lr {rates[-1]:.4f}", flush=True)
windows = [sum(losses[i : i + 20]) / 20 for i in range(0, STEPS, 20)]
truth(healthy=True, first=windows[0], all_windows=[round(w, 3) for w in windows], late=windows[-1])
