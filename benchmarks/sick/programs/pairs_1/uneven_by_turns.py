"""Healthy: two ranks and batches of unequal size, the longer one here or there: on the whole both work alike."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, STEPS, SIZE, WIDTH = 10, 128, 500, 128, 512


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


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
    losses, own, rows_seen = [], [], 0
    for step in range(1, STEPS + 1):
        begin = time.thread_time()
        rows = BATCH + 48 * int(torch.randint(-1, 2, (), generator=generator))
        y = torch.randint(0, CLASSES, (rows,), generator=generator)
        rows_seen += rows
        loss = cross_entropy(model(kinds[y] + 4 * torch.randn(rows, SIZE, generator=generator)), y)
        optimizer.zero_grad()
        own.append(time.thread_time() - begin)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    truth(
        healthy=True,
        rank=rank,
        rows_a_step=rows_seen / STEPS,
        guessing=2.303,
        own_milliseconds_before_backward=1e3 * sorted(own)[STEPS // 2],
        late=sum(losses[-50:]) / 50,
    )
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
