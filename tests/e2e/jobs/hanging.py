"""A job of two ranks over gloo in which rank 1 stops after a few steps, as in a loader that never returns: rank 0 hangs
in the collective of its step. PERFAGENT_TEST_FOLDER/go lets it end."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import perfagent

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
perfagent.attach(model, optimizer, name="hanging")
go = Path(os.environ["PERFAGENT_TEST_FOLDER"]) / "go"


def read_from_a_dead_disk() -> None:
    while not go.exists():
        time.sleep(0.05)


for step in range(30):
    if rank == 1 and step == 20:
        read_from_a_dead_disk()
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
