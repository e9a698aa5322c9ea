"""At step 451 the process is stopped, as on a host that is suspended: no thread of it runs any more."""

import json
import os
import signal
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss

SIZE, HIDDEN, CODE, STEPS, FREEZE = 300, 400, 12, 2400, 450


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(SIZE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CODE))
        self.decode = nn.Sequential(nn.Linear(CODE, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, SIZE))

    def forward(self, x):
        return self.decode(self.encode(x))


def spectra(generator, count, lines):
    """Sums of eight bell curves."""
    height = torch.rand(count, len(lines), generator=generator)
    return height @ torch.exp(-((torch.arange(SIZE) / SIZE - lines[:, None]) ** 2) / 0.002)


torch.manual_seed(0)
generator = torch.Generator().manual_seed(31)
lines = torch.rand(8, generator=generator)
model = Autoencoder()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(1, STEPS + 1):
    x = spectra(generator, 256, lines)
    loss = mse_loss(model(x + 0.05 * torch.randn(x.shape, generator=generator)), x)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step} loss {loss.item():.5f}", flush=True)
    if step == FREEZE:
        print("TRUTH", json.dumps({"onset": time.time(), "step": step}), flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
