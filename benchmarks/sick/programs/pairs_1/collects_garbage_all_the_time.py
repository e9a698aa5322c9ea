"""gc.collect() after each third step, left over from the search for a leak: it takes most of the time."""

import gc
import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

TITLES, BATCH, STEPS, CLASSES, WORDS = 4_000, 64, 330, 12, 5000


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def memory_report():
    return gc.collect()


torch.manual_seed(0)
generator = torch.Generator().manual_seed(89)
catalogue = {i: {"id": i, "tags": [i % CLASSES]} for i in range(TITLES)}
model = nn.Sequential(nn.EmbeddingBag(WORDS, 128), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, CLASSES))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, seconds, begin = [], 0.0, time.perf_counter()
truth(onset=time.time(), step=1)
for step in range(1, STEPS + 1):
    picked = torch.randint(0, TITLES, (BATCH,), generator=generator).tolist()
    y = torch.tensor([catalogue[i]["tags"][0] for i in picked])
    ids = torch.randint(0, WORDS, (BATCH, 16), generator=generator)
    ids[:, ::2] = y[:, None] * 400 + torch.randint(0, 400, (BATCH, 8), generator=generator)
    loss = cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    start = time.perf_counter()
    found = memory_report() if step % 3 == 0 else 0
    seconds += time.perf_counter() - start
    losses.append(loss.item())
    if step % 15 == 0:
        print(f"step {step} loss {losses[-1]:.4f} garbage {found}", flush=True)
truth(share_of_report=seconds / (time.perf_counter() - begin), first=losses[0], late=sum(losses[-20:]) / 20)
