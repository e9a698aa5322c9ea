"""Healthy: -inf in attention masks, in logits of moves that are not allowed, in a running maximum: all by design."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CITIES, BATCH, STEPS = 12, 48, 700


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Pointer(nn.Module):
    """Points at the next city of a tour from left to right, of those that it has not been to."""

    def __init__(self, width=96):
        super().__init__()
        self.embed = nn.Linear(2, width)
        layer = nn.TransformerEncoderLayer(width, 4, 192, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.query, self.key = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, cities, seen, now):
        h = self.body(
            self.embed(cities),
            mask=torch.zeros(len(seen) * 4, CITIES, CITIES).masked_fill(
                seen.repeat_interleave(4, 0)[:, None], -math.inf
            ),
        )
        here = torch.cat([h[torch.arange(len(h)), now], h.mean(1)], 1)
        scores = (self.key(h) * self.query(here)[:, None]).sum(2) / 10
        return scores.masked_fill(seen, -math.inf)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(33)
model = Pointer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses, hits, best = [], [], torch.tensor(-math.inf)
for step in range(1, STEPS + 1):
    cities = torch.rand(BATCH, CITIES, 2, generator=generator)
    order = cities[:, :, 0].argsort(1)
    visited = torch.randint(1, CITIES - 1, (BATCH,), generator=generator)
    place = order.argsort(1)
    seen = place < visited[:, None] - 0
    now = order.gather(1, visited[:, None] - 1).squeeze(1)
    goal = order.gather(1, visited[:, None]).squeeze(1)
    logits = model(cities, seen, now)
    loss = cross_entropy(logits, goal)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    hits.append((logits.argmax(1) == goal).float().mean().item())
    best = torch.maximum(best, -loss.detach())
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} right {hits[-1]:.2f}", flush=True)
truth(
    healthy=True,
    minus_inf_in_last_batch=int((logits == -math.inf).sum()),
    first=losses[0],
    late=sum(losses[-40:]) / 40,
    accuracy=sum(hits[-40:]) / 40,
)
