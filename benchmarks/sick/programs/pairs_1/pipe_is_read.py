"""Healthy: a scorer runs as a process of its own after each 350 steps, takes three seconds and is read to its end."""

import json
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SCORE, SIZE = 9, 192, 750, 350, 80
SCORER = (
    "import sys, time\ntime.sleep(3)\nfor i in range(int(sys.argv[1])): print(f'sentence {i:05d} score 0.{i % 10}')"
)


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def score(sentences):
    scorer = subprocess.Popen([sys.executable, "-c", SCORER, str(sentences)], stdout=subprocess.PIPE, text=True)
    return len(scorer.communicate()[0].splitlines())


torch.manual_seed(0)
generator = torch.Generator().manual_seed(80)
kinds = torch.randn(CLASSES, SIZE, generator=generator)
model = nn.Sequential(
    nn.Linear(SIZE, 768),
    nn.ReLU(),
    nn.Linear(768, 768),
    nn.ReLU(),
    nn.Linear(768, 768),
    nn.ReLU(),
    nn.Linear(768, CLASSES),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
losses, pauses = [], []
for step in range(1, STEPS + 1):
    y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
    loss = cross_entropy(model(kinds[y] + 3 * torch.randn(BATCH, SIZE, generator=generator)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f}", flush=True)
    if step % SCORE == 0:
        start = time.perf_counter()
        print(f"{score(20_000)} sentences scored", flush=True)
        pauses.append(round(time.perf_counter() - start, 1))
truth(healthy=True, pauses=pauses, guessing=2.197, late=sum(losses[-50:]) / 50)
