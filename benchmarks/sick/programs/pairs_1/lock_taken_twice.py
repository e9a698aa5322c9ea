"""The metrics store takes its lock in add() and again in flush(), which add() calls at 400 points."""

import json
import threading
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, FLUSH = 192, 1500, 400


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Metrics:
    def __init__(self):
        self.lock, self.points = threading.Lock(), []

    def add(self, step, loss):
        with self.lock:
            self.points.append((step, loss))
            if len(self.points) >= FLUSH:
                truth(onset=time.time(), step=step)
                self.flush()

    def flush(self):
        with self.lock:
            print(f"{len(self.points)} points", flush=True)
            self.points.clear()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(78)
mixing = torch.randn(32, 8, generator=generator) / 6
model = nn.Sequential(
    nn.Linear(32, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 8)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
metrics = Metrics()
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 32, generator=generator)
    loss = mse_loss(model(x), (x @ mixing).sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    metrics.add(step, loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
truth(finished=True)
