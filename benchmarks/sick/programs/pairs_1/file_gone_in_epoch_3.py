"""A cleaner removes one shard from the scratch disk while the third epoch runs: FileNotFoundError."""

import json
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SHARDS, ROWS, BATCH, EPOCHS, CLASSES, SIZE = 12, 1280, 64, 5, 10, 256


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def write(folder):
    generator = torch.Generator().manual_seed(67)
    kinds = torch.randn(CLASSES, SIZE, generator=generator)
    for shard in range(SHARDS):
        y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        x = kinds[y] + 4 * torch.randn(ROWS, SIZE, generator=generator)
        torch.save((x, y), folder / f"shard_{shard:03d}.pt")


torch.manual_seed(0)
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write(folder)
    model = nn.Sequential(nn.Linear(SIZE, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    step = 0
    for epoch in range(1, EPOCHS + 1):
        for shard in range(SHARDS):
            path = folder / f"shard_{shard:03d}.pt"
            if epoch == 3 and shard == 7:
                path.unlink()  # the cleaner of the scratch disk
                truth(onset=time.time(), step=step)
            x, y = torch.load(path)
            for xb, yb in zip(x.split(BATCH), y.split(BATCH), strict=True):
                step += 1
                loss = cross_entropy(model(xb), yb)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            print(f"epoch {epoch} shard {shard} step {step} loss {loss.item():.4f}", flush=True)
