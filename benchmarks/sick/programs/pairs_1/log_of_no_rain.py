"""River levels from the log of rain: dry days come, log(0) is -inf in the inputs, and all weights become NaN."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, Dataset

DAYS, GAUGES, BATCH, DRY_FROM = 48_000, 14, 96, 27_000


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Rivers(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(37)
        self.rain = torch.rand(DAYS, GAUGES, 8, generator=generator) * 20 + 0.1
        weight = torch.rand(GAUGES, 8, generator=generator) / 40
        self.level = (self.rain.log() * weight).sum((1, 2))
        self.level = (self.level - self.level.mean()) / self.level.std()
        dry = torch.randperm(DAYS - DRY_FROM, generator=generator)[:40] + DRY_FROM
        self.rain[dry, 3, -1] = 0.0

    def __len__(self):
        return DAYS

    def __getitem__(self, day):
        return self.rain[day].log().flatten(), self.level[day]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8 * GAUGES, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, onset = [], None
    for step, (x, y) in enumerate(DataLoader(Rivers(), batch_size=BATCH), 1):
        loss = mse_loss(model(x).squeeze(1), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if onset is None and not bool(x.isfinite().all()):
            onset = step
            truth(onset=time.time(), step=step, loss=str(losses[-1]), infinite_inputs=int(x.isinf().sum()))
        if step % 25 == 0:
            print(f"step {step} mse {losses[-1]:.4f}", flush=True)
    truth(steps=step, nonfinite_losses=sum(not math.isfinite(v) for v in losses), before=losses[onset - 2])


if __name__ == "__main__":
    main()
