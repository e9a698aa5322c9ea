"""A pipeline of two stages: the cut leaves one block on the first and six on the second, which the first waits for."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

BLOCKS_OF_STAGE = 1, 6
WIDTH, CLASSES, BATCH, PARTS, STEPS = 384, 12, 256, 16, 120


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def stage_module(stage):
    blocks = [Block() for _ in range(BLOCKS_OF_STAGE[stage])]
    return (
        nn.Sequential(nn.Linear(64, WIDTH), *blocks)
        if stage == 0
        else nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))
    )


def batches():
    generator = torch.Generator().manual_seed(5)
    kinds = torch.randn(CLASSES, 64, generator=generator)
    while True:
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        yield kinds[y] + 2.5 * torch.randn(BATCH, 64, generator=generator), y


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = stage_module(rank)
    stage = PipelineStage(module, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, PARTS, loss_fn=cross_entropy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=2e-4)
    if rank == 0:
        print(f"TRUTH {json.dumps({'onset': time.time(), 'step': 1})}\n", end="", flush=True)
    for step, (x, y) in zip(range(1, STEPS + 1), batches()):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        else:
            losses = []
            schedule.step(target=y, losses=losses)
            if step % 20 == 0:
                print(f"step {step} loss {torch.stack(losses).mean().item():.4f}\n", end="", flush=True)
        optimizer.step()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
