"""Two ranks: rank 1 has 640 batches, leaves its loop and exits; rank 0 calls for gradients and fails."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, SIZE = 9, 64, 96
BATCHES = (900, 640)


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
        nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, CLASSES))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    losses = []
    for step, (x, y) in enumerate(shard(rank), 1):
        if step == min(BATCHES) + 1:
            truth(onset=time.time(), step=step, rank=rank)
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    print(f"rank {rank} has no more batches after step {len(losses)}", flush=True)
    truth(rank=rank, steps=len(losses))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
