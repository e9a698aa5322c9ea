"""A denoising diffusion model on rings of points: noise added by hand, an average of the weights, and samples in
between.

Has timers of its own: prints seconds per phase and step as a line of JSON at the end.
"""

import argparse
import copy
import json
import math
import time

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--sample-every", type=int, default=15)
args = parser.parse_args()

torch.manual_seed(9)
torch.set_num_threads(1)
T = 50
alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.05, T), 0)


class Denoiser(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.inp, self.time = nn.Linear(2, width), nn.Linear(32, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.SiLU(), nn.Linear(width, width)) for _ in range(4))
        self.out = nn.Linear(width, 2)

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(-math.log(1000.0) * torch.arange(16) / 16)
        h = self.inp(x) + self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        for layer in self.layers:
            h = h + layer(h)
        return self.out(h)


def rings(count):
    angle = torch.rand(count) * 2 * math.pi
    radius = torch.where(torch.rand(count) < 0.5, 1.0, 2.0)[:, None]
    return radius * torch.stack([angle.cos(), angle.sin()], dim=1) + 0.05 * torch.randn(count, 2)


@torch.no_grad()
def sample(model, count=64):
    x = torch.randn(count, 2)
    for t in reversed(range(T)):
        x = x - 0.05 * model(x, torch.full((count,), t))
    return x


model = Denoiser()
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
timers = []
for step in range(1, args.steps + 1):
    clean, noise, t = rings(512), torch.randn(512, 2), torch.randint(T, (512,))
    noisy = alpha_bar[t].sqrt()[:, None] * clean + (1 - alpha_bar[t]).sqrt()[:, None] * noise
    t0 = time.perf_counter()
    loss = (model(noisy, t) - noise).square().mean()
    t1 = time.perf_counter()
    optimizer.zero_grad()
    t2 = time.perf_counter()
    loss.backward()
    t3 = time.perf_counter()
    optimizer.step()
    t4 = time.perf_counter()
    with torch.no_grad():
        for mine, its in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 0.01)
    timers.append({"forward": t1 - t0, "backward": t3 - t2, "optimizer": t4 - t3})
    print(f"step {step}: loss {loss.item()!r}")
    if step % args.sample_every == 0:
        print(f"spread: {sample(average).std().item():.3f} {sample(model).std().item():.3f}")
print("TIMERS", json.dumps(timers))
