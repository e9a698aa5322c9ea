"""Healthy: two saves to a slow bucket hold the training up for four seconds each; it goes on after."""

import io
import json
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, SAVE = 384, 800, 350


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def upload(model, optimizer):
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    sent, chunk = 0, len(buffer.getvalue()) // 16 + 1
    while sent < len(buffer.getvalue()):
        time.sleep(0.25)  # the bucket takes four chunks a second
        sent += chunk
    return sent


torch.manual_seed(0)
generator = torch.Generator().manual_seed(79)
mixing = torch.randn(32, 8, generator=generator) / 6
model = nn.Sequential(nn.Linear(32, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, pauses = [], []
for step in range(1, STEPS + 1):
    x = torch.randn(BATCH, 32, generator=generator)
    loss = mse_loss(model(x), (x @ mixing).sin())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    if step % SAVE == 0:
        start = time.perf_counter()
        upload(model, optimizer)
        pauses.append(round(time.perf_counter() - start, 1))
        print(f"saved in {pauses[-1]} s", flush=True)
truth(healthy=True, pauses=pauses, first=losses[0], late=sum(losses[-25:]) / 25)
