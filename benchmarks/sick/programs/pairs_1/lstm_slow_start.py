"""Healthy: remember the first symbol of sixty, open forget gates: at chance for dozens of steps, then learned."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

SYMBOLS, LENGTH, BATCH, STEPS, HIDDEN, BIAS = 8, 60, 64, 900, 96, 2.5


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Memory(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 32)
        self.rnn = nn.LSTM(32, HIDDEN, batch_first=True)
        with torch.no_grad():
            self.rnn.bias_ih_l0[HIDDEN : 2 * HIDDEN] = BIAS
        self.head = nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0][:, -1])


torch.manual_seed(0)
generator = torch.Generator().manual_seed(41)
model = Memory()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
losses, hits = [], []
for step in range(1, STEPS + 1):
    ids = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=generator)
    logits = model(ids)
    loss = cross_entropy(logits, ids[:, 0])
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses.append(loss.item())
    hits.append((logits.argmax(1) == ids[:, 0]).float().mean().item())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} acc {hits[-1]:.2f}", flush=True)
truth(
    healthy=True,
    flat_steps=next(i for i, v in enumerate(losses) if v < 1.9),
    guessing=math.log(SYMBOLS),
    late=sum(losses[-50:]) / 50,
    accuracy=sum(hits[-50:]) / 50,
)
