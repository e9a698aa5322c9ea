"""Healthy: states are kept at steps 1, 2, 4, 8 ... 512 for a study of early training, and then each 1000 steps."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import huber_loss

SEEN, AHEAD, BATCH, STEPS = 48, 12, 64, 5000


class Keeper:
    def __init__(self, folder, *parts):
        self.folder, self.parts, self.kept = Path(folder), parts, 0

    def after(self, step):
        if step % 1000 == 0 or (step <= 512 and step & (step - 1) == 0):
            torch.save([part.state_dict() for part in self.parts], self.folder / f"step_{step}.pt")
            self.kept += 1


class Forecast(nn.Module):
    """Of the next hours from the last two days."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Sequential(
            nn.Conv1d(1, 24, 7, padding=3), nn.ReLU(), nn.Conv1d(24, 24, 7, padding=3), nn.ReLU()
        )
        self.out = nn.Linear(24 * SEEN // 4, AHEAD)

    def forward(self, seen):
        h = self.filters(seen[:, None])
        return self.out(nn.functional.avg_pool1d(h, 4).flatten(1))


def load_curves(generator):
    hours = torch.arange(SEEN + AHEAD) + torch.randint(0, 24, (BATCH, 1), generator=generator)
    size, tilt = 1 + torch.rand(BATCH, 1, generator=generator), torch.randn(BATCH, 1, generator=generator)
    curve = size * torch.sin(hours * 0.2618) + 0.02 * tilt * torch.arange(SEEN + AHEAD)
    return curve + 0.2 * torch.randn(curve.shape, generator=generator)


torch.manual_seed(0)
generator, model = torch.Generator().manual_seed(15), Forecast()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
with tempfile.TemporaryDirectory() as folder:
    keeper = Keeper(folder, model, optimizer)
    for step in range(1, STEPS + 1):
        curves = load_curves(generator)
        loss = huber_loss(model(curves[:, :SEEN]), curves[:, SEEN:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        keeper.after(step)
        if step % 100 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    print("TRUTH", json.dumps({"healthy": True, "loss": loss.item(), "kept": keeper.kept}), flush=True)
