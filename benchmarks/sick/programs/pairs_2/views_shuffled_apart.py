"""Contrastive learning with two views that are shuffled each by itself: no pair is one, the loss stays at ln 192."""

import json
import math
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset

ROWS, SIZE, BATCH, EPOCHS, TEMPERATURE = 9600, 96, 192, 16, 0.1


class Views(Dataset):
    """Of one thing each: the same hidden numbers through a mixing of its own, with noise."""

    def __init__(self, view):
        hidden = torch.randn(ROWS, 12, generator=torch.Generator().manual_seed(5))
        generator = torch.Generator().manual_seed(50 + view)
        mixing = torch.randn(12, SIZE, generator=generator)
        self.rows = torch.tanh(hidden @ mixing / 3) + 0.3 * torch.randn(ROWS, SIZE, generator=generator)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.rows[i]


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = self.tower(), self.tower()

    @staticmethod
    def tower():
        return nn.Sequential(
            nn.Linear(SIZE, 384), nn.BatchNorm1d(384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, 48)
        )

    def forward(self, left, right):
        scores = normalize(self.left(left), dim=1) @ normalize(self.right(right), dim=1).T / TEMPERATURE
        target = torch.arange(len(scores))
        return (cross_entropy(scores, target) + cross_entropy(scores.T, target)) / 2


torch.manual_seed(0)
loaders = [DataLoader(Views(view), batch_size=BATCH, shuffle=True) for view in (0, 1)]
towers = TwoTowers()
optimizer = torch.optim.AdamW(towers.parameters(), lr=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=EPOCHS * len(loaders[0]))
print("TRUTH", json.dumps({"onset": time.time(), "step": 1, "guessing": math.log(BATCH)}), flush=True)
for epoch in range(1, EPOCHS + 1):
    total = 0.0
    for left, right in zip(*loaders):
        loss = towers(left, right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item() / len(loaders[0])
    print(f"epoch {epoch} loss {total:.4f}", flush=True)
