"""Healthy: samples come from a slow disk, but a thread reads eight batches ahead: training hardly ever waits."""

import json
import queue
import threading
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, CLASSES, SIDE = 32, 400, 6, 24


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def read_ahead(shelf):
    generator = torch.Generator().manual_seed(52)
    kinds = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
    for _ in range(STEPS):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        x = kinds[y] + 3.0 * torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        time.sleep(0.01)  # the disk
        shelf.put((x, y))
    shelf.put(None)


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 48, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(48, 48, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(6),
    nn.Flatten(),
    nn.Linear(48 * 36, CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
shelf = queue.Queue(maxsize=8)
threading.Thread(target=read_ahead, args=(shelf,), daemon=True).start()
losses, waited, begin = [], 0.0, time.perf_counter()
while True:
    last = time.perf_counter()
    batch = shelf.get()
    waited += time.perf_counter() - last
    if batch is None:
        break
    loss = cross_entropy(model(batch[0]), batch[1])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if len(losses) % 20 == 0:
        print(f"step {len(losses)} loss {losses[-1]:.4f}", flush=True)
truth(healthy=True, share_waited=waited / (time.perf_counter() - begin), first=losses[0], late=sum(losses[-50:]) / 50)
