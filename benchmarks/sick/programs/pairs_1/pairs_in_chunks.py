"""Healthy: after each epoch all pairs of embeddings are compared in chunks: memory rises for a second, and falls."""

import json
import resource

import torch
from torch import nn
from torch.nn.functional import normalize

ITEMS, SIZE, BATCH, STEPS, EPOCH, CHUNK = 12_000, 32, 192, 600, 200, 6000


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def nearest(vectors):
    """The most similar other item of each."""
    found = []
    for start in range(0, ITEMS, CHUNK):
        similar = vectors[start : start + CHUNK] @ vectors.T
        similar[torch.arange(len(similar)), torch.arange(start, start + len(similar))] = -1
        found.append(similar.argmax(1))
    return torch.cat(found)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(75)
items = torch.randn(ITEMS, SIZE, generator=generator)
net = nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 24))
optimizer = torch.optim.Adam(net.parameters(), lr=3e-4)
losses = []
for step in range(1, STEPS + 1):
    rows = torch.randint(0, ITEMS, (BATCH,), generator=generator)
    a = normalize(net(items[rows]), dim=1)
    b = normalize(net(items[rows] + 0.5 * torch.randn(BATCH, SIZE, generator=generator)), dim=1)
    loss = nn.functional.cross_entropy(a @ b.T / 0.1, torch.arange(BATCH))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    if step % EPOCH == 0:
        with torch.no_grad():
            similar = nearest(normalize(net(items), dim=1))
        print(f"step {step} items that are nearest to some other: {len(similar.unique())}", flush=True)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
truth(healthy=True, first=losses[0], late=sum(losses[-50:]) / 50, peak_mib=peak)
