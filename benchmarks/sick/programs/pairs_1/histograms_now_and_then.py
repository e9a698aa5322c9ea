"""Healthy: the same histograms in plain Python of each 150th step: those are slow, all of them cost little."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, EVERY, BINS = 512, 1500, 150, 30


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def histogram(values):
    """Of logarithms of sizes, each value by itself."""
    counts = [0] * BINS
    for value in values.flatten()[::8].tolist():
        size = abs(value)
        counts[min(BINS - 1, int(-math.log10(size) * 3)) if 1e-10 < size < 1 else 0] += 1
    return counts


class Histograms:
    def __init__(self, model):
        self.model, self.pages, self.seconds = model, {}, 0.0

    def after_step(self, step):
        start = time.perf_counter()
        if step % EVERY == 0:
            for name, p in self.model.named_parameters():
                self.pages[name] = (histogram(p.detach()), histogram(p.grad))
        self.seconds += time.perf_counter() - start


torch.manual_seed(0)
generator = torch.Generator().manual_seed(53)
mixing = torch.randn(40, 10, generator=generator) / 6
model = nn.Sequential(nn.Linear(40, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, callback, begin = [], Histograms(model), time.perf_counter()
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 40, generator=generator)
    loss = mse_loss(model(x), (x @ mixing).sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    callback.after_step(step)
    losses.append(loss.item())
    if step % 50 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    share_of_callback=callback.seconds / (time.perf_counter() - begin),
    first=losses[0],
    late=sum(losses[-20:]) / 20,
)
