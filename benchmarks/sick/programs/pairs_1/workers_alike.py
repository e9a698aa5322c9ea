"""Simulated scenes, seeded with 0 in __iter__: both loader workers and all epochs give the same 40 batches."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset

BATCH, EPOCHS, SCENES, SIDE = 48, 8, 1920, 20


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Scenes(IterableDataset):
    """Pictures of a blurred ball and where it is."""

    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        grid = torch.arange(SIDE).float()
        for _ in range(SCENES):
            at = torch.rand(2, generator=generator) * SIDE
            bright = (-((grid[:, None] - at[0]) ** 2 + (grid - at[1]) ** 2) / 8).exp()
            yield bright[None] + 0.4 * torch.randn(1, SIDE, SIDE, generator=generator), at / SIDE


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6400, 128),
        nn.ReLU(),
        nn.Linear(128, 2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    loader = DataLoader(Scenes(), batch_size=BATCH, num_workers=2)
    losses, seen, step = [], set(), 0
    truth(onset=time.time(), step=2)
    for epoch in range(EPOCHS):
        for x, y in loader:
            step += 1
            loss = mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen.add(x.numpy().tobytes())
            if step % 40 == 0:
                print(f"epoch {epoch} step {step} loss {losses[-1]:.5f}", flush=True)
    truth(batches=step, different_batches=len(seen), late=sum(losses[-40:]) / 40)


if __name__ == "__main__":
    main()
