"""Healthy: contrastive learning with much noise in the views: the loss falls early and settles at a half."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import DataLoader, Dataset

ROWS, SIZE, BATCH, EPOCHS, TEMPERATURE = 9600, 96, 192, 16, 0.1


class Views(Dataset):
    """Two of one thing: the same hidden numbers through two mixings, with noise."""

    def __init__(self):
        generator = torch.Generator().manual_seed(5)
        hidden = torch.randn(ROWS, 12, generator=generator)
        mixings = torch.randn(2, 12, SIZE, generator=generator)
        self.rows = torch.tanh(hidden @ mixings / 3) + 1.0 * torch.randn(2, ROWS, SIZE, generator=generator)

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        return self.rows[0, i], self.rows[1, i]


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
loader = DataLoader(Views(), batch_size=BATCH, shuffle=True)
towers = TwoTowers()
optimizer = torch.optim.AdamW(towers.parameters(), lr=5e-4)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=EPOCHS * len(loader))
for epoch in range(1, EPOCHS + 1):
    total = 0.0
    for left, right in loader:
        loss = towers(left, right)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        total += loss.item() / len(loader)
    print(f"epoch {epoch} loss {total:.4f}", flush=True)
print("TRUTH", json.dumps({"healthy": True, "guessing": math.log(BATCH), "loss": total}), flush=True)
