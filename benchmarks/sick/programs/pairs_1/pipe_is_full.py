"""A scorer that runs after 350 steps prints more than a pipe holds, nobody reads, and wait() waits for it."""

import json
import subprocess
import sys
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, BATCH, STEPS, SCORE, SIZE = 9, 96, 1200, 350, 80
SCORER = "import sys\nfor i in range(int(sys.argv[1])): print(f'sentence {i:05d} score 0.{i % 10}')"


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


def score(sentences):
    scorer = subprocess.Popen([sys.executable, "-c", SCORER, str(sentences)], stdout=subprocess.PIPE, text=True)
    scorer.wait()
    return len(scorer.stdout.readlines())


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
losses = []
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
        truth(onset=time.time(), step=step)
        print(f"{score(20_000)} sentences scored", flush=True)
truth(finished=True)
