"""Healthy: two loader workers end after each epoch and new ones start; each time it goes on within a moment."""

import json

import torch
from torch import nn
from torch.nn.functional import l1_loss
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

LENGTH, BLOCKS, EPOCHS = 256, 100, 6


class Echoes(IterableDataset):
    """Pulses in noise, with the time at which they come; read in order from files that are made up here."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        worker = get_worker_info().id
        generator = torch.Generator().manual_seed(1000 * self.epoch + worker)
        for _ in range(BLOCKS):
            place = torch.rand(64, generator=generator)
            pulse = torch.exp(-(((torch.arange(LENGTH) / LENGTH - place[:, None]) / 0.02) ** 2))
            yield from zip(pulse + 0.3 * torch.randn(64, LENGTH, generator=generator), place)


class Listener(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 32, 9, 2, 4),
            nn.ReLU(),
            nn.Conv1d(32, 48, 9, 2, 4),
            nn.ReLU(),
            nn.Conv1d(48, 48, 9, 2, 4),
            nn.ReLU(),
        )
        self.out = nn.Linear(48 * LENGTH // 8, 1)

    def forward(self, x):
        return self.out(self.conv(x[:, None]).flatten(1))[:, 0]


if __name__ == "__main__":
    torch.manual_seed(0)
    model, echoes, step = Listener(), Echoes(), 0
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-4)
    for epoch in range(EPOCHS):
        echoes.epoch = epoch
        for signals, place in DataLoader(echoes, batch_size=64, num_workers=2):
            loss = l1_loss(model(signals), place)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"epoch {epoch} step {step} loss {loss.item():.4f}", flush=True)
    print("TRUTH", json.dumps({"healthy": True, "loss": loss.item()}), flush=True)
