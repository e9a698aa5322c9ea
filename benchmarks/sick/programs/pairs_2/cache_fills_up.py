"""Healthy: an lru_cache with a limit fills with 100 MB while each picture is read for the first time, and stays."""

import functools
import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

KINDS, PICTURES, SIDE, BATCH, STEPS = 8, 1024, 48, 64, 900

generator = torch.Generator().manual_seed(77)
shapes = (
    torch.randn(KINDS, 3, SIDE // 8, SIDE // 8, generator=generator).repeat_interleave(8, 2).repeat_interleave(8, 3)
)
kind_of = torch.randint(0, KINDS, (PICTURES,), generator=generator)
pictures = (
    (shapes[kind_of] * 40 + 128 + 60 * torch.randn(PICTURES, 3, SIDE, SIDE, generator=generator)).clamp(0, 255).byte()
)


@functools.lru_cache(maxsize=4096)
def decoded(row, quarter):
    """Decoding is dear, so what was made once is kept."""
    return torch.rot90(pictures[row].float().sub(128).div(64), quarter, (1, 2))


def batches():
    while True:
        rows = torch.randint(0, PICTURES, (BATCH,), generator=generator)
        quarters = torch.randint(0, 4, (BATCH,), generator=generator)
        x = torch.stack([decoded(*one) for one in zip(rows.tolist(), quarters.tolist())])
        yield x * (0.8 + 0.4 * torch.rand(BATCH, 1, 1, 1, generator=generator)), kind_of[rows]


class SmallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 5, stride=3, padding=2)
        self.body = nn.Sequential(
            nn.BatchNorm2d(24), nn.ReLU(), nn.Conv2d(24, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()
        )
        self.head = nn.Linear(32, KINDS)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


torch.manual_seed(0)
model = SmallNet()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
for step, (x, y) in zip(range(1, STEPS + 1), batches()):
    loss = cross_entropy(model(x), y, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        size = decoded.cache_info().currsize * 3 * SIDE * SIDE * 4 / 1e6
        print(f"step {step} loss {loss.item():.4f} cache {size:.0f} MB", flush=True)
print("TRUTH", json.dumps({"healthy": True, "loss": loss.item(), "cache": decoded.cache_info().currsize}), flush=True)
