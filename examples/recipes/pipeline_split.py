"""A model split over two processes, four micro-batches on the way (GPipe, Huang et al. 2019), by
torch.distributed.pipelining.

    torchrun --nproc-per-node 2 examples/recipes/pipeline_split.py --steps 60

For models that do not fit on one device and whose parts are connected by little: an image encoder on one, a language
model on the other. With p stages and m micro-batches the devices idle for (p - 1) / (m + p - 1) of the time, here a
fifth; more micro-batches make it less. Try sharding (FSDP, ZeRO) first: it keeps all devices busy.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import perfagent

BATCH, MICRO_BATCHES, WIDTH = 32, 4, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks != 2:
        raise SystemExit(
            f"this example has two stages, and {ranks} processes were started: torchrun --nproc-per-node 2"
        )
    device = torch.device(f"cuda:{rank}" if on_gpu else "cpu")

    torch.manual_seed(0)
    stages = [
        torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.GELU()),
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU(), torch.nn.Linear(WIDTH, 1)),
    ]
    part = stages[rank].to(device)
    stage = PipelineStage(part, rank, ranks, device)
    schedule = ScheduleGPipe(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=3e-3)

    perfagent.attach(part, optimizer, project="examples", name="pipeline")
    losses: list[float] = []
    for _ in range(options.steps):
        x = torch.randn(BATCH, 16, device=device)  # the same on both, since the seed is
        target = x[:, :4].sum(dim=1, keepdim=True).sin()
        if rank == 0:
            schedule.step(x)
        else:
            of_step: list[torch.Tensor] = []
            schedule.step(target=target, losses=of_step)
            losses.append(torch.stack(of_step).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    if rank == 1:
        print(f"loss {losses[0]:.3f} to {losses[-1]:.3f} in {options.steps} steps over {ranks} stages")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
