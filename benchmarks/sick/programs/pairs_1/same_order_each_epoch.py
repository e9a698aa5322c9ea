"""Healthy: twelve epochs in the same order over mixed rows, two workers with a half of the rows each."""

import json
import math

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

BATCH, EPOCHS, ROWS, SIZE, CLASSES = 64, 12, 3840, 144, 15


def truth(**kw):
    print("TRUTH", json.dumps(kw), flush=True)


class Rows(IterableDataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(46)
        self.y = torch.randint(0, CLASSES, (ROWS,), generator=generator)
        self.x = torch.randn(CLASSES, SIZE, generator=generator)[self.y] + 3.0 * torch.randn(
            ROWS, SIZE, generator=generator
        )

    def __iter__(self):
        worker = get_worker_info()
        for i in range(worker.id, ROWS, worker.num_workers):
            yield self.x[i], self.y[i]


def main():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(SIZE, 1024),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(1024, CLASSES),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
    loader = DataLoader(Rows(), batch_size=BATCH, num_workers=2, persistent_workers=True)
    losses, seen, step = [], set(), 0
    for epoch in range(EPOCHS):
        for x, y in loader:
            step += 1
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seen.add(x.numpy().tobytes())
        print(f"epoch {epoch} step {step} loss {sum(losses[-60:]) / 60:.4f}", flush=True)
    truth(
        healthy=True, batches=step, different_batches=len(seen), guessing=math.log(CLASSES), late=sum(losses[-60:]) / 60
    )


if __name__ == "__main__":
    main()
