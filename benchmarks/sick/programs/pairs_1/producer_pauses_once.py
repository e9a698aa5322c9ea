"""Healthy: a thread makes the batches; at batch 251 it waits six seconds for its disk, and goes on."""

import json
import queue
import threading
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, PAUSE, CLASSES, SIDE = 32, 700, 250, 8, 20


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def produce(shelf):
    generator = torch.Generator().manual_seed(77)
    kinds = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)
    for number in range(STEPS):
        if number == PAUSE:
            time.sleep(6)  # the disk comes back from a failover
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        shelf.put((kinds[y] + 2 * torch.randn(BATCH, 1, SIDE, SIDE, generator=generator), y))


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 48, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(48, 48, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(5),
    nn.Flatten(),
    nn.Linear(1200, CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shelf = queue.Queue(maxsize=4)
threading.Thread(target=produce, args=(shelf,), daemon=True).start()
losses, longest = [], 0.0
for step in range(1, STEPS + 1):
    start = time.perf_counter()
    x, y = shelf.get()
    longest = max(longest, time.perf_counter() - start)
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
truth(healthy=True, longest_wait=longest, guessing=2.079, late=sum(losses[-30:]) / 30)
