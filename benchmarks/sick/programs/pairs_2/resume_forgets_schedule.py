"""The job restarts after step 600. It loads the weights, but not the state of Adam and of the schedule: the learning rate starts at 0.2 again."""

import json
import math
import tempfile
import time
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


def attempt(number, file, peak):
    """One start of the job; the first is ended by the cluster."""
    torch.manual_seed(0)
    model, diffusion, step = Denoiser(), Diffusion(number), 0
    if file.exists():
        state = torch.load(file)
        model.load_state_dict(state["model"])
        step = state["step"]
        print("TRUTH", json.dumps({"onset": time.time(), "step": step + 1}), flush=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=peak)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 + 0.5 * math.cos(math.pi * i / STEPS))
    while step < STEPS and not (number == 1 and step == ENDS):
        step += 1
        x, t, noise = diffusion.batch()
        loss = mse_loss(model(x, t), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 30 == 0:
            rate = schedule.get_last_lr()[0]
            print(f"attempt {number} step {step} loss {loss.item():.4f} lr {rate:.2e}", flush=True)
    torch.save({"step": step, "model": model.state_dict()}, file)


with tempfile.TemporaryDirectory() as folder:
    attempt(1, Path(folder) / "state.pt", peak=1e-3)
    attempt(2, Path(folder) / "state.pt", peak=0.2)  # somebody has changed the default meanwhile
