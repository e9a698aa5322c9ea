"""Each rank sums its metrics in the order in which it met them: at step 1200 the orders, and the shapes, differ."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

STEPS, REPORT, LATER, SIZE = 2000, 50, 1200, 48


class TwoTasks(nn.Module):
    """Says of a parcel which of 30 routes it takes, how heavy it is and whether it breaks."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SIZE, 384), nn.SiLU(), nn.Linear(384, 384), nn.SiLU())
        self.route, self.weight, self.breaks = nn.Linear(384, 30), nn.Linear(384, 1), nn.Linear(384, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.route(h), self.weight(h)[:, 0], self.breaks(h)[:, 0]


def parcels(rank):
    generator, rule = torch.Generator().manual_seed(90 + rank), torch.Generator().manual_seed(9)
    routes, heavy, fragile = (torch.randn(n, SIZE, generator=rule) for n in (30, 1, 1))
    while True:
        x = torch.randn(96, SIZE, generator=generator)
        yield x, (x @ routes.T).argmax(1), (x @ heavy.T)[:, 0] / SIZE**0.5, ((x @ fragile.T)[:, 0] > 0).float()


def measure(logits, weight, breaks, batch, late):
    """Sums by name. The fragile ones come first where the shard is sorted by that, which rank 1's second one is."""
    _, y, heavy, fragile = batch
    sums = {
        "hits": torch.bincount(y[logits.argmax(1) == y], minlength=30).float(),
        "weight": (weight - heavy).square().sum()[None],
    }
    own = {"breaks": torch.stack([((breaks > 0) == (fragile > 0.5)).float().sum(), fragile.sum()])}
    return own | sums if late else sums | own


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = DistributedDataParallel(TwoTasks())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, batch in zip(range(1, STEPS + 1), parcels(rank)):
        logits, weight, breaks = model(batch[0])
        loss = cross_entropy(logits, batch[1]) + mse_loss(weight, batch[2])
        loss = loss + binary_cross_entropy_with_logits(breaks, batch[3])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % REPORT == 0:
            if step == LATER and rank == 0:
                print(f"TRUTH {json.dumps({'onset': time.time(), 'step': step})}\n", end="", flush=True)
            sums = measure(logits.detach(), weight.detach(), breaks.detach(), batch, step >= LATER and rank == 1)
            for value in sums.values():
                dist.all_reduce(value)
            if rank == 0:
                print(f"step {step} loss {loss.item():.4f} hits {sums['hits'].sum() / 192:.3f}\n", end="", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
