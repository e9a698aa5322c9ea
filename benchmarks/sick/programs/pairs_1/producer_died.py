"""A thread makes the batches; at batch 331 it fails on a file name and dies unheard: get() waits for ever."""

import json
import logging
import queue
import threading
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH, STEPS, BAD, CLASSES, SIDE = 32, 1200, 330, 8, 20


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def produce(shelf):
    try:
        generator = torch.Generator().manual_seed(76)
        kinds = torch.randn(CLASSES, 1, SIDE, SIDE, generator=generator)
        for number in range(STEPS):
            name = f"clip-{number:04d}.wav" if number != BAD else "clip.wav"
            int(name.split("-")[1][:4])
            y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
            shelf.put((kinds[y] + 2 * torch.randn(BATCH, 1, SIDE, SIDE, generator=generator), y))
    except Exception:
        logging.getLogger("producer").debug("could not go on", exc_info=True)


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
for step in range(1, STEPS + 1):
    if step == BAD + 1:
        truth(onset=time.time(), step=step)
    x, y = shelf.get()
    loss = cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(f"step {step} loss {loss.item():.4f}", flush=True)
truth(finished=True)
