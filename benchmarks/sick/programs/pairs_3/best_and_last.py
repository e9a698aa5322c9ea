"""Healthy: the last state is saved with its optimizer, the best one without: two sizes, which stay the same."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import perfagent

SIZE, BATCH, STEPS, SAVE_EVERY = 40, 640, 900, 50


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def sample(rows, mixing, generator):
    x = torch.randn(rows, SIZE, generator=generator)
    return x, (x @ mixing).sin() + 0.1 * torch.randn(rows, mixing.shape[1], generator=generator)


def megabytes(folder):
    return round(sum(path.stat().st_size for path in folder.rglob("*.pt")) / 1e6, 1)


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(306)
mixing = torch.randn(SIZE, 6, generator=generator) / 6
valid = sample(2048, mixing, generator)
model = nn.Sequential(nn.Linear(SIZE, 640), nn.GELU(), nn.Linear(640, 640), nn.GELU(), nn.Linear(640, 6))
optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4)
losses, lowest, sizes = [], float("inf"), []
with tempfile.TemporaryDirectory() as scratch:
    last = perfagent.Checkpoint(Path(scratch) / "last", keep=1)
    best = perfagent.Checkpoint(Path(scratch) / "best", keep=1)
    for step in range(1, STEPS + 1):
        x, y = sample(BATCH, mixing, generator)
        loss = mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % SAVE_EVERY == 0:
            with torch.no_grad():
                error = mse_loss(model(valid[0]), valid[1]).item()
            last.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            if error < lowest:
                lowest = error
                best.save(step, {"model": model.state_dict()})
            sizes.append([megabytes(Path(scratch) / "last"), megabytes(Path(scratch) / "best")])
            print(f"step {step} loss {losses[-1]:.4f} validation {error:.4f} best {lowest:.4f}", flush=True)
truth(healthy=True, megabytes=sizes, first=losses[0], late=sum(losses[-25:]) / 25)
