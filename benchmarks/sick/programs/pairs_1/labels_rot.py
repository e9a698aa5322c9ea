"""Stream of pictures whose labels rot from step 251 on: ever more of them are those of the sample before."""

import json
import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

CLASSES, BATCH, STEPS, ROT, SIDE = 10, 64, 1000, 250, 16


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Stream(IterableDataset):
    def __init__(self):
        self.generator = torch.Generator().manual_seed(26)
        self.goods = torch.randn(CLASSES, 3, SIDE, SIDE, generator=self.generator)

    def __iter__(self):
        old = 0
        for i in range(BATCH * STEPS):
            y = int(torch.randint(0, CLASSES, (), generator=self.generator))
            x = self.goods[y] + 1.5 * torch.randn(3, SIDE, SIDE, generator=self.generator)
            share = max(0.0, (i / BATCH - ROT) / (STEPS - ROT))
            label = old if float(torch.rand((), generator=self.generator)) < share else y
            old = y
            yield x, label


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, CLASSES),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, hits = [], []
    for step, (x, y) in enumerate(DataLoader(Stream(), batch_size=BATCH), 1):
        if step == ROT + 1:
            truth(onset=time.time(), step=step)
        logits = model(x)
        loss = cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        hits.append((logits.argmax(1) == y).float().mean().item())
        if step % 25 == 0:
            print(f"step {step} loss {losses[-1]:.4f} acc {hits[-1]:.2f}", flush=True)
    truth(
        before=sum(losses[ROT - 50 : ROT]) / 50,
        late=sum(losses[-50:]) / 50,
        accuracy_before=sum(hits[ROT - 50 : ROT]) / 50,
        accuracy_late=sum(hits[-50:]) / 50,
    )


if __name__ == "__main__":
    main()
