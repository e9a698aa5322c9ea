"""Healthy: two ranks with 480 and 460 batches, in the join() context of DDP: who ends first answers for the rest."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, SIZE = 9, 64, 96
BATCHES = (480, 460)


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


def shard(rank):
    generator = torch.Generator().manual_seed(83 + rank)
    kinds = torch.randn(CLASSES, SIZE, generator=torch.Generator().manual_seed(1))
    for _ in range(BATCHES[rank]):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        yield kinds[y] + 3 * torch.randn(BATCH, SIZE, generator=generator), y


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(SIZE, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, CLASSES))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    losses = []
    with model.join():
        for step, (x, y) in enumerate(shard(rank), 1):
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if step % 20 == 0:
                print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    print(f"rank {rank} has no more batches after step {len(losses)}", flush=True)
    truth(healthy=True, rank=rank, steps=len(losses), guessing=2.197, late=sum(losses[-50:]) / 50)
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
