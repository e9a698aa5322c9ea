"""Healthy: a sparse autoencoder keeps the 16 strongest of 1024 units: 98 % of activations are zero by design."""

import json

import torch
from torch import nn

UNITS, KEEP, BATCH, STEPS, SIZE = 1024, 16, 192, 800, 128


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class SparseCoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.act, self.decoder = nn.Linear(SIZE, UNITS), nn.ReLU(), nn.Linear(UNITS, SIZE, bias=False)

    def forward(self, x):
        h = self.act(self.encoder(x))
        top = h.topk(KEEP, dim=1)
        sparse = torch.zeros_like(h).scatter(1, top.indices, top.values)
        return self.decoder(sparse), sparse


torch.manual_seed(0)
generator = torch.Generator().manual_seed(40)
words = torch.nn.functional.normalize(torch.randn(300, SIZE, generator=generator), dim=1)
model = SparseCoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
losses = []
used = torch.zeros(UNITS, dtype=torch.bool)
for step in range(1, STEPS + 1):
    picked = torch.randint(0, 300, (BATCH, 5), generator=generator)
    x = (words[picked] * (0.5 + torch.rand(BATCH, 5, 1, generator=generator))).sum(1)
    again, code = model(x)
    loss = (again - x).square().sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    used |= (code > 0).any(0) if step > STEPS - 100 else used
    if step % 25 == 0:
        print(f"step {step} loss {losses[-1]:.4f} zeros {(code == 0).float().mean():.3f}", flush=True)
truth(
    healthy=True,
    first=losses[0],
    late=sum(losses[-20:]) / 20,
    zeros=(code == 0).float().mean().item(),
    units_used=used.float().mean().item(),
)
