"""Two ranks: rank 1 skips a batch with NaN, is a step short, and waits at a barrier for a rank that waits for it."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, STEPS, BAD, SIZE = 9, 64, 720, 301, 96


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
    for step in range(1, STEPS + 1):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        x = kinds[y] + 3 * torch.randn(BATCH, SIZE, generator=generator)
        if rank == 1 and step == BAD:
            x[3, 5] = float("nan")
        if not bool(x.isfinite().all()):
            print(f"rank {rank}: batch of step {step} is not finite, skipped", flush=True)
            continue
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
        if step % 360 == 0:  # all save together
            truth(onset=time.time(), step=step, rank=rank, in_barrier=True)
            dist.barrier()
    truth(finished=True, rank=rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
