"""Spawned loader workers and a script without a __main__ guard: the run fails at the workers' first batch."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

CLASSES, ROWS, BATCH, SIZE = 10, 9600, 32, 200


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(70)
kinds = torch.randn(CLASSES, SIZE, generator=generator)
y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
x = kinds[y] + 3 * torch.randn(ROWS, SIZE, generator=generator)
model = nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
for step in range(1, 301):  # a first round without workers
    rows = torch.randint(0, ROWS, (96,), generator=generator)
    loss = cross_entropy(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"warm-up step {step} loss {loss.item():.4f}", flush=True)
truth(onset=time.time(), step=300)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, num_workers=2, multiprocessing_context="spawn")
for step, (xb, yb) in enumerate(loader, 301):
    loss = cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
truth(finished=True)
