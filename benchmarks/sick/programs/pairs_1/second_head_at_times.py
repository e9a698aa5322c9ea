"""Healthy: two ranks and a head used in every third step; DDP looks for unused weights, as it was told."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, STEPS, SIZE = 9, 64, 600, 96


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU())
        self.head = nn.Linear(768, CLASSES)
        self.spare = nn.Linear(768, 2)

    def forward(self, x, both):
        h = self.body(x)
        return self.head(h), self.spare(h) if both else None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    kinds = torch.randn(CLASSES, SIZE)
    generator = torch.Generator().manual_seed(82 + rank)
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(1, STEPS + 1):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        x = kinds[y] + 3 * torch.randn(BATCH, SIZE, generator=generator)
        logits, odd = model(x, both=step % 3 == 0)
        loss = cross_entropy(logits, y)
        if odd is not None:
            loss = loss + 0.3 * cross_entropy(odd, y % 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    truth(healthy=True, rank=rank, guessing=2.197, late=sum(losses[-50:]) / 50)
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
