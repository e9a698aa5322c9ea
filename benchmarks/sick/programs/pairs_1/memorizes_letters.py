"""Plain loop over 240 noisy letters, no regularization: validation turns early, the training loss goes to zero."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch.utils.data import DataLoader, TensorDataset

CLASSES, SIDE, EPOCHS, ROWS, NOISE, DROP = 8, 14, 90, 240, 6.0, 0.0


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
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
curve, step, best = [], 0, (float("inf"), 0, 0.0)
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
    best = min(best, (val_loss, step, time.time()))
    print(f"epoch {epoch} step {step} train_loss {total:.4f} val_loss {val_loss:.4f}", flush=True)
truth(onset=best[2], step=best[1], best_val=best[0], last_val=curve[-1][1], train_last=curve[-1][0])
