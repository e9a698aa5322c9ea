"""Healthy: batches of 32 with an odd one of 11 rows at the end of each epoch, which is no harm."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

BATCH, CLASSES, CHANNELS, LENGTH, ROWS = 32, 6, 4, 96, 32 * 150 + 11


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(CHANNELS, 48, 7, stride=2), nn.ReLU(), nn.Conv1d(48, 64, 5, stride=2), nn.ReLU()
        )
        self.head = nn.Linear(64 * 21, CLASSES)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


torch.manual_seed(0)
generator = torch.Generator().manual_seed(68)
kinds = torch.randn(CLASSES, CHANNELS, LENGTH, generator=generator)
y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
x = kinds[y] + 3 * torch.randn(ROWS, CHANNELS, LENGTH, generator=generator)
loader = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True, generator=generator)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
step, losses = 0, []
for epoch in range(6):
    for xb, yb in loader:
        step += 1
        loss = cross_entropy(model(xb), yb)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0:
            print(f"epoch {epoch} step {step} loss {losses[-1]:.4f}", flush=True)
truth(healthy=True, guessing=1.792, late=sum(losses[-150:]) / 150)
