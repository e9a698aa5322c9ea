"""Two ranks: a check of all weights was left on for rank 1 alone, and rank 0 waits for it in each all-reduce."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, STEPS, SIZE, WIDTH = 10, 96, 360, 128, 512


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


def check(model):
    """Whether a weight matrix is close to singular."""
    return [
        torch.linalg.svdvals(p.detach())[-1].item() for p in model.parameters() if p.dim() == 2 and min(p.shape) <= 128
    ]


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    kinds = torch.randn(CLASSES, SIZE)
    generator = torch.Generator().manual_seed(84 + rank)
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(SIZE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
            nn.Linear(WIDTH, CLASSES),
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    losses, own = [], []
    truth(onset=time.time(), step=1, rank=rank)
    for step in range(1, STEPS + 1):
        begin = time.thread_time()
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        loss = cross_entropy(model(kinds[y] + 4 * torch.randn(BATCH, SIZE, generator=generator)), y)
        if rank == 1:
            for _ in range(4):
                check(model)
        optimizer.zero_grad()
        own.append(time.thread_time() - begin)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    truth(rank=rank, own_milliseconds_before_backward=1e3 * sorted(own)[STEPS // 2], late=sum(losses[-50:]) / 50)
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
