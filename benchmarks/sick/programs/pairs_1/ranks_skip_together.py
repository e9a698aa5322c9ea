"""Healthy: two ranks, a batch with NaN now and then: they ask each other, and both skip the step or none does."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, STEPS, SIZE = 9, 64, 900, 96


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    kinds = torch.randn(CLASSES, SIZE)
    generator = torch.Generator().manual_seed(81 + rank)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(SIZE, 384), nn.ReLU(), nn.Linear(384, 384), nn.ReLU(), nn.Linear(384, CLASSES))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses, skipped = [], 0
    for step in range(1, STEPS + 1):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        x = kinds[y] + 3 * torch.randn(BATCH, SIZE, generator=generator)
        if rank == step % 2 and step % 70 == 0:
            x[3, 5] = float("nan")
        bad = (~x.isfinite().all()).float()
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            skipped += 1
            print(f"rank {rank}: batch of step {step} is skipped", flush=True)
            continue
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
        losses.append(loss.item())
    dist.barrier()
    truth(healthy=True, rank=rank, skipped=skipped, guessing=2.197, late=sum(losses[-50:]) / 50)
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
