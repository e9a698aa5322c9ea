"""Healthy: gradients of eight small batches add up before each step, those of four at the end of an epoch."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, ROWS, BATCH, WINDOW, EPOCHS = 14, 90, 4992, 32, 8, 22


def residual(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))


class Net(nn.Module):
    def __init__(self, width=320):
        super().__init__()
        self.stem, self.one, self.two = nn.Linear(SIZE, width), residual(width), residual(width)
        self.out = nn.Linear(width, CLASSES)

    def forward(self, x):
        x = self.stem(x)
        x = x + self.one(x)
        return self.out(x + self.two(x))


def recordings():
    y = torch.randint(0, CLASSES, (ROWS,))
    return torch.randn(CLASSES, SIZE)[y] + 3.0 * torch.randn(ROWS, SIZE), y


torch.manual_seed(0)
net, (x, y) = Net(), recordings()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
for epoch in range(1, EPOCHS + 1):
    batches, total = torch.randperm(ROWS).split(BATCH), 0.0
    for begin in range(0, len(batches), WINDOW):
        window = batches[begin : begin + WINDOW]
        for rows in window:
            loss = cross_entropy(net(x[rows]), y[rows])
            (loss / len(window)).backward()
            total += loss.item() / len(batches)
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} loss {total:.4f} last window of {len(window)}", flush=True)
print("TRUTH", json.dumps({"healthy": True, "loss": total}), flush=True)
