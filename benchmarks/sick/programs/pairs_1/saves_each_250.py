"""Healthy: a large checkpoint each 250 steps takes as long as many steps, all of them a hundredth of the time."""

import json
import os
import tempfile
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, SAVE_EVERY, WORDS, CLASSES = 256, 1000, 250, 12000, 20


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def save(path, model, optimizer, step):
    with Path(path).open("wb") as file:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)
        file.flush()
        os.fsync(file.fileno())


torch.manual_seed(0)
generator = torch.Generator().manual_seed(54)
model = nn.Sequential(nn.EmbeddingBag(WORDS, 256), nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, saving, begin = [], 0.0, time.perf_counter()
with tempfile.TemporaryDirectory() as folder:
    for step in range(1, STEPS + 1):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        ids = torch.randint(0, WORDS, (BATCH, 24), generator=generator)
        ids[:, ::2] = y[:, None] * 200 + torch.randint(0, 200, (BATCH, 12), generator=generator)
        loss = cross_entropy(model(ids), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % SAVE_EVERY == 0:
            start = time.perf_counter()
            save(f"{folder}/last.pt", model, optimizer, step)
            saving += time.perf_counter() - start
        if step % 50 == 0:
            print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(healthy=True, share_saving=saving / (time.perf_counter() - begin), first=losses[0], late=sum(losses[-20:]) / 20)
