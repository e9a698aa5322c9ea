"""Healthy: letters in thousands and with dropout: validation is better than training, both fall and settle."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIDE, EPOCHS, ROWS, NOISE, DROP = 8, 14, 9, 2560, 2.4, 0.5


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Letters(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        )
        self.first, self.last = nn.Linear(64 * 49, 192), nn.Linear(192, CLASSES)

    def forward(self, x):
        h = dropout(self.conv(x).flatten(1), DROP, self.training)
        return self.last(dropout(self.first(h).relu(), DROP, self.training))


def letters(n, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.randn(CLASSES, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(43))
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    return TensorDataset(shapes[y] + NOISE * torch.randn(n, 1, SIDE, SIDE, generator=generator), y)


torch.manual_seed(0)
train = DataLoader(letters(ROWS, 1), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(3))
validation = DataLoader(letters(320, 2), batch_size=64)
model = Letters()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05)
curve, step = [], 0
for epoch in range(1, EPOCHS + 1):
    model.train()
    total = 0.0
    for x, y in train:
        step += 1
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / len(train)
    model.eval()
    with torch.no_grad():
        val_loss = sum(cross_entropy(model(x), y).item() for x, y in validation) / len(validation)
    curve.append((total, val_loss))
    print(f"epoch {epoch} step {step} train_loss {total:.4f} val_loss {val_loss:.4f}", flush=True)
truth(healthy=True, train_and_val=[(round(a, 3), round(b, 3)) for a, b in curve])
