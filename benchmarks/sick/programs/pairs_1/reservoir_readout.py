"""Healthy: an echo state network, whose large random part is frozen by design and whose readout is trained."""

import json

import torch
from torch import nn
from torch.nn.functional import mse_loss

UNITS, BATCH, LENGTH, STEPS = 400, 32, 60, 550


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Reservoir(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(1, UNITS, batch_first=True)
        with torch.no_grad():
            spectral = torch.linalg.eigvals(self.rnn.weight_hh_l0).abs().max()
            self.rnn.weight_hh_l0.mul_(0.9 / spectral)
            self.rnn.weight_ih_l0.uniform_(-0.5, 0.5)
        self.rnn.requires_grad_(False)
        self.readout = nn.Linear(UNITS, 1)

    def forward(self, x):
        return self.readout(self.rnn(x)[0])


def series(generator):
    start = torch.rand(BATCH, 1, generator=generator) * 6.28
    t = start + 0.2 * torch.arange(LENGTH + 1)
    wave = torch.sin(t) + 0.5 * torch.sin(2.3 * t) + 0.02 * torch.randn(BATCH, LENGTH + 1, generator=generator)
    return wave[:, :-1, None], wave[:, 1:, None]


torch.manual_seed(0)
generator = torch.Generator().manual_seed(14)
model = Reservoir()
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-3)
losses = []
for step in range(1, STEPS + 1):
    x, y = series(generator)
    loss = mse_loss(model(x)[:, 10:], y[:, 10:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if step % 20 == 0:
        print(f"step {step} mse {losses[-1]:.5f}", flush=True)
truth(healthy=True, first=losses[0], late=sum(losses[-20:]) / 20, variance=y.var().item())
