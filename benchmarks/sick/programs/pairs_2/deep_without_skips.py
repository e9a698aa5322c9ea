"""Twenty ReLU layers without skip connections, in the default initialization: only the last layer learns, and it learns only how frequent each class is."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy

DEPTH, WIDTH, CLASSES, SIZE, BATCH, EPOCHS = 20, 160, 6, 40, 100, 24
SHARES = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.1, 0.05])


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(SIZE, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.stem(x).relu()
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def table(count):
    y = torch.multinomial(SHARES, count, replacement=True)
    return torch.randn(CLASSES, SIZE, generator=torch.Generator().manual_seed(3))[y] + torch.randn(count, SIZE), y


def main():
    torch.manual_seed(0)
    (x, y), model = table(8000), Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    print(
        "TRUTH",
        json.dumps({"onset": time.time(), "step": 1, "shares_alone": -(SHARES * SHARES.log()).sum().item()}),
        flush=True,
    )
    for epoch in range(1, EPOCHS + 1):
        total, hits = 0.0, 0
        for rows in torch.randperm(len(x)).split(BATCH):
            logits = model(x[rows])
            loss = cross_entropy(logits, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * BATCH / len(x)
            hits += (logits.argmax(1) == y[rows]).sum().item()
        norms = [layer.weight.grad.norm().item() for layer in (model.stem, model.head)]
        print(
            f"epoch {epoch} loss {total:.4f} right {hits / len(x):.3f} gradients {norms[0]:.1e} {norms[1]:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()
