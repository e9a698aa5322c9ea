"""Each cycle of the rate peaks higher than the last (gamma above one): the loss ends far above what it once was."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import smooth_l1_loss

FEATURES, BATCH, CYCLES, HALF = 20, 128, 8, 350


class Regressor(nn.Module):
    """Predicts the yield of a field from what was measured there."""

    def __init__(self, *widths):
        super().__init__()
        pairs = zip((FEATURES, *widths), (*widths, 1))
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)[:, 0]


def fields(seed):
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, FEATURES, generator=generator) / FEATURES**0.5
    while True:
        x = torch.randn(BATCH, FEATURES, generator=generator)
        noise = 0.1 * torch.randn(BATCH, generator=generator)
        yield x, 2 * torch.sin(2 * x @ a) + (x @ b) ** 2 + noise


torch.manual_seed(0)
model = Regressor(256, 256, 256)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
schedule = torch.optim.lr_scheduler.CyclicLR(
    optimizer, base_lr=0.005, max_lr=0.02, step_size_up=HALF, mode="exp_range", gamma=1.0008, cycle_momentum=False
)
best, mean = float("inf"), 4.0
for step, (x, y) in zip(range(1, 2 * HALF * CYCLES + 1), fields(61)):
    loss = smooth_l1_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    mean += 0.05 * (loss.item() - mean)
    best = min(best, mean)
    if step == 2 * HALF * 5:
        print("TRUTH", json.dumps({"onset": time.time(), "step": step}), flush=True)
    if step % 40 == 0:
        print(f"step {step} loss {mean:.4f} best {best:.4f} lr {schedule.get_last_lr()[0]:.4f}", flush=True)
