"""torch.set_num_threads(16), from the script of a big machine, on two cores: threads wait for each other."""

import json
import os
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SIZE, WIDTH, THREADS = 10, 256, 320, 128, 320, 16


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def train_step(model, optimizer, kinds, generator):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    loss = cross_entropy(model(kinds[y] + 4 * torch.randn(BATCH, SIZE, generator=generator)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


torch.manual_seed(0)
torch.set_num_threads(THREADS)
generator = torch.Generator().manual_seed(87)
kinds = torch.randn(CLASSES, SIZE, generator=generator)
layers, width = [], SIZE
for _ in range(5):
    layers += [nn.Linear(width, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()]
    width = WIDTH
model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
losses, seconds = [], []
truth(onset=time.time(), step=1, threads=torch.get_num_threads(), cores=len(os.sched_getaffinity(0)))
for step in range(1, STEPS + 1):
    start = time.perf_counter()
    losses.append(train_step(model, optimizer, kinds, generator))
    seconds.append(time.perf_counter() - start)
    if step % 20 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
torch.set_num_threads(1)
alone = []
for _ in range(20):  # what a step takes with one thread
    start = time.perf_counter()
    train_step(model, optimizer, kinds, generator)
    alone.append(time.perf_counter() - start)
truth(
    milliseconds=1e3 * sorted(seconds)[STEPS // 2], with_one_thread=1e3 * sorted(alone)[10], late=sum(losses[-20:]) / 20
)
