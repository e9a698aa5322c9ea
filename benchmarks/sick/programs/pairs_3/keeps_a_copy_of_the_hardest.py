"""Healthy: from epoch 5 on each checkpoint has a copy of the 256 hardest items, half a megabyte more than before."""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

ITEMS, SIZE, WIDTH, CLASSES, BATCH = 150_000, 64, 512, 20, 192
EPOCHS, STEPS_AN_EPOCH, MINING_FROM, HARDEST = 9, 220, 5, 256


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.body(x))


@torch.no_grad()
def mine(net, x, y):
    """Features of the items with the largest loss, to begin the next run with."""
    features = torch.cat([net.body(part) for part in x.split(4096)])
    loss = cross_entropy(net.head(features), y, reduction="none")
    ranked = features[loss.argsort(descending=True)]
    return ranked[:HARDEST].clone()  # or all of them would be saved


torch.set_num_threads(1)
torch.manual_seed(0)
generator = torch.Generator().manual_seed(304)
kinds = torch.randn(CLASSES, SIZE, generator=generator)
y = torch.randint(0, CLASSES, (ITEMS,), generator=generator)
x = kinds[y] + 2 * torch.randn(ITEMS, SIZE, generator=generator)
net = Net()
optimizer = torch.optim.AdamW(net.parameters(), lr=3e-4)
losses, sizes = [], []
with tempfile.TemporaryDirectory() as folder:
    for epoch in range(1, EPOCHS + 1):
        for rows in torch.randperm(ITEMS, generator=generator)[: STEPS_AN_EPOCH * BATCH].split(BATCH):
            loss = cross_entropy(net(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        state = {"epoch": epoch, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
        if epoch >= MINING_FROM:
            state["hardest"] = mine(net, x, y)
        path = Path(folder) / f"epoch_{epoch}.pt"
        torch.save(state, path)
        sizes.append(round(path.stat().st_size / 1e6, 1))
        (Path(folder) / f"epoch_{epoch - 2}.pt").unlink(missing_ok=True)
        print(f"epoch {epoch} loss {sum(losses[-STEPS_AN_EPOCH:]) / STEPS_AN_EPOCH:.4f} saved {path.name}", flush=True)
truth(healthy=True, megabytes=sizes, first=losses[0], late=sum(losses[-50:]) / 50)
