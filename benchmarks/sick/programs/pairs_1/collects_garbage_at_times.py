"""Healthy: gc is off in training and asked for each 200 steps, a short pause; the steps between are even."""

import gc
import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

TITLES, BATCH, STEPS, EVERY, CLASSES, WORDS = 400_000, 256, 1000, 200, 12, 5000


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(90)
catalogue = {i: {"id": i, "tags": [i % CLASSES]} for i in range(TITLES)}
model = nn.Sequential(
    nn.EmbeddingBag(WORDS, 128), nn.Linear(128, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, CLASSES)
)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
losses, seconds, begin = [], 0.0, time.perf_counter()
gc.disable()
for step in range(1, STEPS + 1):
    picked = torch.randint(0, TITLES, (BATCH,), generator=generator).tolist()
    y = torch.tensor([catalogue[i]["tags"][0] for i in picked])
    ids = torch.randint(0, WORDS, (BATCH, 16), generator=generator)
    ids[:, ::4] = y[:, None] * 400 + torch.randint(0, 400, (BATCH, 4), generator=generator)
    loss = cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % EVERY == 0:
        start = time.perf_counter()
        gc.collect()
        seconds += time.perf_counter() - start
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    share_of_collecting=seconds / (time.perf_counter() - begin),
    guessing=2.485,
    first=losses[0],
    late=sum(losses[-20:]) / 20,
)
