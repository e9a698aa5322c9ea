"""Healthy: word counts of short messages: 99.5 % of all inputs are zero, some rows are empty; it learns."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

WORDS, TOPICS, BATCH, STEPS = 3000, 12, 64, 700


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(50)


def messages():
    """Up to thirty words, some messages have none at all."""
    y = torch.randint(0, TOPICS, (BATCH,), generator=generator)
    counts = torch.zeros(BATCH, WORDS)
    length = torch.randint(0, 30, (BATCH,), generator=generator)
    for row in range(BATCH):
        any_word = torch.randint(0, WORDS, (int(length[row]),), generator=generator)
        of_topic = y[row] * 250 + torch.randint(0, 250, any_word.shape, generator=generator)
        counts[row].index_add_(0, torch.where(any_word % 2 == 0, any_word, of_topic), torch.ones(len(any_word)))
    return counts, y


model = nn.Sequential(nn.Linear(WORDS, 512), nn.ReLU(), nn.Linear(512, TOPICS))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses, hits, zeros = [], [], []
for step in range(1, STEPS + 1):
    x, y = messages()
    zeros.append((x == 0).float().mean().item())
    logits = model(x)
    loss = cross_entropy(logits, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits.append((logits.argmax(1) == y).float().mean().item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} acc {hits[-1]:.2f}", flush=True)
truth(
    healthy=True,
    zeros=sum(zeros) / STEPS,
    guessing=math.log(TOPICS),
    late=sum(losses[-50:]) / 50,
    accuracy=sum(hits[-50:]) / 50,
)
