"""Healthy: a pipeline of three ranks, cut where each has the same work: few layers on large pictures, many on small."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import cross_entropy

CLASSES, SIDE, CHANNELS, BATCH, PARTS, STEPS = 10, 28, 48, 48, 6, 150
CUTS = [0, 3, 5, 13]  # rank r has the layers from CUTS[r] to CUTS[r + 1]


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: three ranks write


class Layer(nn.Module):
    def __init__(self, inputs, pool=False):
        super().__init__()
        self.conv = nn.Conv2d(inputs, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, CHANNELS)
        self.pool = nn.MaxPool2d(2) if pool else nn.Identity()

    def forward(self, x):
        return self.pool(torch.relu(self.norm(self.conv(x))))


def make_stage(rank, ranks):
    """Five layers on pictures of 28 x 28, eight more on 14 x 14."""
    layers = [Layer(CHANNELS if i else 3, pool=i == 4) for i in range(13)][CUTS[rank] : CUTS[rank + 1]]
    if rank == ranks - 1:
        layers += [nn.AvgPool2d(7), nn.Flatten(), nn.Linear(4 * CHANNELS, CLASSES)]
    return nn.Sequential(*layers)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    generator = torch.Generator().manual_seed(308)  # the same on all ranks
    signs = torch.randn(CLASSES, 3, SIDE, SIDE, generator=generator)
    part = make_stage(rank, ranks)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=PARTS, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    means, begin = [], time.process_time()
    for step in range(1, STEPS + 1):
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        x = signs[y] + 1.5 * torch.randn(BATCH, 3, SIDE, SIDE, generator=generator)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank < ranks - 1:
            schedule.step()
        else:
            schedule.step(target=y, losses=losses)
            means.append(torch.stack(losses).mean().item())
            if step % 20 == 0:
                print(f"step {step} loss {means[-1]:.4f}", flush=True)
        optimizer.step()
    truth(
        healthy=True,
        rank=rank,
        own_milliseconds_a_step=1e3 * (time.process_time() - begin) / STEPS,
        first=means[:1],
        late=sum(means[-20:]) / 20,
    )
    dist.barrier()  # or one rank is gone while the others still close their connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
