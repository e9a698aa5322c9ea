"""Healthy: two ranks gather four micro-batches without a word (no_sync) and talk once, in one piece."""

import json
import math
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, STEPS, MICRO, SIDE = 10, 24, 300, 4, 16


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    kinds = torch.randn(CLASSES, 3, SIDE, SIDE)
    generator = torch.Generator().manual_seed(86 + rank)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Linear(512, CLASSES),
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(1, STEPS + 1):
        total = 0.0
        for micro in range(MICRO):
            y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
            x = kinds[y] + 2 * torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
            with nullcontext() if micro == MICRO - 1 else model.no_sync():
                loss = cross_entropy(model(x), y) / MICRO
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {total:.4f}", flush=True)
    truth(healthy=True, rank=rank, guessing=math.log(CLASSES), first=losses[0], late=sum(losses[-20:]) / 20)
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
