"""The thread that saves ends with an IndexError at its ninth save; the training goes on for long without any."""

import json
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import huber_loss

SEEN, AHEAD, BATCH, STEPS, SAVE_EVERY = 48, 12, 64, 7000, 100


class Saver(threading.Thread):
    """Keeps the last states in a few slots of its folder."""

    def __init__(self, folder):
        super().__init__(daemon=True)
        self.slots = [Path(folder) / f"slot_{i}.pt" for i in range(8)]
        self.count, self.state, self.wanted = 0, None, threading.Event()

    def run(self):
        while True:
            self.wanted.wait()
            self.wanted.clear()
            torch.save(self.state, self.slots[self.count])
            self.count += 1

    def take(self, step, model, optimizer):
        self.state = {"step": step, "model": {k: v.clone() for k, v in model.state_dict().items()}}
        self.state["rate"] = optimizer.param_groups[0]["lr"]
        self.wanted.set()


class Forecast(nn.Module):
    """Of the next hours from the last two days."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Sequential(
            nn.Conv1d(1, 24, 7, padding=3), nn.ReLU(), nn.Conv1d(24, 24, 7, padding=3), nn.ReLU()
        )
        self.out = nn.Linear(24 * SEEN // 4, AHEAD)

    def forward(self, seen):
        h = self.filters(seen[:, None])
        return self.out(nn.functional.avg_pool1d(h, 4).flatten(1))


def load_curves(generator):
    hours = torch.arange(SEEN + AHEAD) + torch.randint(0, 24, (BATCH, 1), generator=generator)
    size, tilt = 1 + torch.rand(BATCH, 1, generator=generator), torch.randn(BATCH, 1, generator=generator)
    curve = size * torch.sin(hours * 0.2618) + 0.02 * tilt * torch.arange(SEEN + AHEAD)
    return curve + 0.2 * torch.randn(curve.shape, generator=generator)


torch.manual_seed(0)
generator, model = torch.Generator().manual_seed(15), Forecast()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
with tempfile.TemporaryDirectory() as folder:
    saver = Saver(folder)
    saver.start()
    for step in range(1, STEPS + 1):
        curves = load_curves(generator)
        loss = huber_loss(model(curves[:, :SEEN]), curves[:, SEEN:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 9 * SAVE_EVERY:
            print("TRUTH", json.dumps({"onset": time.time(), "step": step}), flush=True)
        if step % SAVE_EVERY == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
            saver.take(step, model, optimizer)
