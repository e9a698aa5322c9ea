"""House prices with -99999 for 'unknown': three batches hold one, and the loss jumps a millionfold in each."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

ROWS, FACTS, BATCH, EPOCHS, BAD = 60_000, 24, 96, 1, (30_000, 41_000, 41_001, 52_500)


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(28)
facts = torch.randn(ROWS, FACTS, generator=generator)
price = (facts @ torch.randn(FACTS, generator=generator)) / 5 + 0.1 * torch.randn(ROWS, generator=generator)
price[list(BAD)] = -99999.0
model = nn.Sequential(
    nn.Linear(FACTS, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 1)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
losses, spikes = [], []
for step, start in enumerate(range(0, ROWS - BATCH, BATCH), 1):
    x, y = facts[start : start + BATCH], price[start : start + BATCH]
    if float(y.min()) < -1000:
        spikes.append(step)
        if len(spikes) == 1:
            truth(onset=time.time(), step=step)
    loss = mse_loss(model(x).squeeze(1), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 25 == 0:
        print(f"step {step} mse {losses[-1]:.4f}", flush=True)
first = spikes[0]
truth(
    steps=spikes,
    before=losses[first - 2],
    at=losses[first - 1],
    after=losses[first : first + 3],
    late=sum(losses[-20:]) / 20,
)
