"""Healthy: BatchNorm follows slowly, so the first validation is far worse than training; the later ones are as good."""

import json

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

KINDS, SIDE, EPOCHS, MOMENTUM = 10, 12, 22, 0.02


def block(before, after):
    conv = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after, momentum=MOMENTUM), nn.ReLU(), nn.MaxPool2d(2))


def thermograms(count, seed):
    """In degrees, around 30 of them."""
    shapes = torch.randn(KINDS, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, KINDS, (count,), generator=generator)
    return TensorDataset(30 + 4 * shapes[y] + 7 * torch.randn(count, 1, SIDE, SIDE, generator=generator), y)


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    found = [(model(x), y) for x, y in loader]
    model.train()
    logits, y = (torch.cat(part) for part in zip(*found))
    return cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


torch.manual_seed(0)
train = DataLoader(thermograms(6000, 2), batch_size=100, shuffle=True)
held_out = DataLoader(thermograms(1000, 3), batch_size=250)
model = nn.Sequential(block(1, 24), block(24, 48), nn.Flatten(), nn.Linear(48 * 9, KINDS))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
curve = []
for epoch in range(1, EPOCHS + 1):
    total = 0.0
    for x, y in train:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item() / len(train)
    val_loss, accuracy = evaluate(model, held_out)
    print(f"epoch {epoch} train_loss {total:.4f} val_loss {val_loss:.4f} val_accuracy {accuracy:.3f}", flush=True)
    curve.append((round(total, 3), round(val_loss, 3)))
print("TRUTH", json.dumps({"healthy": True, "train_and_val": curve}), flush=True)
