"""Healthy: code, prose and noise by turns, at losses far apart: a zigzag of the same shape all along, and it falls."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

VOCABULARY, LENGTH, BATCH, STEPS = 60, 20, 80, 1140


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Model(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.embed, self.rnn, self.head = (
            nn.Embedding(VOCABULARY, width),
            nn.GRU(width, width, batch_first=True),
            nn.Linear(width, VOCABULARY),
        )

    def forward(self, ids):
        return self.head(self.rnn(self.embed(ids))[0])


torch.manual_seed(0)
generator = torch.Generator().manual_seed(48)
tables = [torch.randint(0, VOCABULARY, (VOCABULARY, ways), generator=generator) for ways in (1, 6, 40)]


def sentences(table):
    ids = [torch.randint(0, VOCABULARY, (BATCH,), generator=generator)]
    for _ in range(LENGTH):
        ids.append(table[ids[-1], torch.randint(0, table.shape[1], (BATCH,), generator=generator)])
    return torch.stack(ids, 1)


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for step in range(1, STEPS + 1):
    ids = sentences(tables[step % 3])
    loss = cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} corpus {step % 3} loss {losses[-1]:.4f}", flush=True)
truth(
    healthy=True,
    guessing=math.log(VOCABULARY),
    late_of_each=[round(sum(losses[-60 + (k - STEPS - 1 + 60) % 3 :: 3]) / 20, 3) for k in range(3)],
    first=losses[0],
)
