"""Healthy: after step 600 the job starts again with all of its state, and warms up for 60 steps."""

import json
import math
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

TIMES, BATCH, STEPS, ENDS = 200, 256, 1500, 600


class Denoiser(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.time = nn.Embedding(TIMES, width)
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, width)
        self.third, self.out = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, x, t):
        h = (self.first(x) + self.time(t)).relu()
        h = h + self.second(h).relu()
        return self.out(h + self.third(h).relu())


class Diffusion:
    def __init__(self, seed):
        self.kept = torch.linspace(1e-4, 0.06, TIMES).neg().add(1).cumprod(0)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self):
        """Points of a spiral, noise, and both in one."""
        turn = 3 * torch.pi * torch.rand(BATCH, generator=self.generator)
        points = torch.stack([turn * turn.cos(), turn * turn.sin()], 1) / 5
        t = torch.randint(0, TIMES, (BATCH,), generator=self.generator)
        noise = torch.randn(BATCH, 2, generator=self.generator)
        kept = self.kept[t, None]
        return kept.sqrt() * points + (1 - kept).sqrt() * noise, t, noise


def attempt(number, file):
    """One start of the job; the first is ended by the cluster."""
    torch.manual_seed(0)
    model, diffusion, step, begin = Denoiser(), Diffusion(number), 0, 0
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = begin = state["step"]
    while step < STEPS and not (number == 1 and step == ENDS):
        step += 1
        warm = min(1.0, (step - begin) / 60)
        optimizer.param_groups[0]["lr"] = rate = warm * 1e-3 * (0.5 + 0.5 * math.cos(math.pi * step / STEPS))
        x, t, noise = diffusion.batch()
        loss = mse_loss(model(x, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 30 == 0:
            print(f"attempt {number} step {step} loss {loss.item():.4f} lr {rate:.2e}", flush=True)
    torch.save({"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return loss.item()


with tempfile.TemporaryDirectory() as folder:
    first, second = (attempt(number, Path(folder) / "state.pt") for number in (1, 2))
    print("TRUTH", json.dumps({"healthy": True, "loss_of_attempts": [first, second]}), flush=True)
