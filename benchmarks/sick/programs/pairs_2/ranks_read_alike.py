"""Two ranks, no DistributedSampler and one seed: both read the same rows in the same order, one of them for nothing."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

KINDS, SIDE, ROWS, EPOCHS = 9, 16, 4800, 6


class Stamps(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        shapes = torch.randn(KINDS, 1, SIDE, SIDE, generator=generator)
        self.kind = torch.randint(0, KINDS, (ROWS,), generator=generator)
        self.picture = shapes[self.kind] + 2.5 * torch.randn(ROWS, 1, SIDE, SIDE, generator=generator)

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return self.picture[row], self.kind[row]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(123)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(24, 48, 3, padding=1), nn.GELU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(768, KINDS),
        )
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    loader = DataLoader(Stamps(), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(7))
    if rank == 0:
        print(f"TRUTH {json.dumps({'onset': time.time(), 'step': 1})}\n", end="", flush=True)
    step = 0
    for epoch in range(1, EPOCHS + 1):
        for picture, kind in loader:
            loss = cross_entropy(model(picture), kind)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 50 == 0:
                print(f"rank {rank} epoch {epoch} step {step} loss {loss.item():.5f}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
