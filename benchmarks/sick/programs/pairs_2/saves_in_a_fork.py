"""Healthy: each 300 steps a forked child writes the weights and is gone again; the training does not wait for it."""

import json
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

SIZE, HIDDEN, CODE, STEPS, SAVE = 300, 400, 12, 2400, 300


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


def save_in_a_child(model, file):
    """The child has the weights of this moment, however long it takes."""
    child = os.fork()
    if child == 0:
        with file.open("wb") as out:
            for name, weight in model.state_dict().items():
                out.write(name.encode() + b"\n" + weight.numpy().tobytes())
        os._exit(0)
    return child


torch.manual_seed(0)
generator = torch.Generator().manual_seed(31)
lines = torch.rand(8, generator=generator)
model, children = Autoencoder(), []
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
with tempfile.TemporaryDirectory() as folder:
    for step in range(1, STEPS + 1):
        x = spectra(generator, 256, lines)
        loss = mse_loss(model(x + 0.05 * torch.randn(x.shape, generator=generator)), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % SAVE == 0:
            print(f"step {step} loss {loss.item():.5f}", flush=True)
            children.append(save_in_a_child(model, Path(folder) / f"{step}.bin"))
    codes = [os.waitpid(child, 0)[1] for child in children]
    print("TRUTH", json.dumps({"healthy": True, "loss": loss.item(), "codes": codes}), flush=True)
