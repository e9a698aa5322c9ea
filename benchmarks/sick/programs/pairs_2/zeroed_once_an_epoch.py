"""zero_grad() is outside the inner loop: gradients of forty batches add up, the loss grows each epoch and is NaN in the sixth."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

CLASSES, SIZE, ROWS, BATCH, EPOCHS = 14, 90, 2560, 64, 40


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
    x = torch.randn(CLASSES, SIZE)[y] + 3.0 * torch.randn(ROWS, SIZE)
    wrong = torch.rand(ROWS) < 0.2  # as people label them
    return x, torch.where(wrong, torch.randint(0, CLASSES, (ROWS,)), y)


torch.manual_seed(0)
net, (x, y) = Net(), recordings()
optimizer = torch.optim.SGD(net.parameters(), lr=0.03)
print("TRUTH", json.dumps({"onset": time.time(), "step": 2}), flush=True)
for epoch in range(1, EPOCHS + 1):
    optimizer.zero_grad()
    losses, norms = [], []
    for rows in torch.randperm(ROWS).split(BATCH):
        loss = cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        norms.append(torch.stack([p.grad.norm() for p in net.parameters()]).norm().item())
    print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f} norm {norms[0]:.3f} to {norms[-1]:.3f}", flush=True)
