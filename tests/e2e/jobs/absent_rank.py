"""Two ranks that train together with collectives of their own; in step 12 rank 1 waits for a lock instead of joining
the all_reduce, until the file `go` is there."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import perfagent

folder = Path(os.environ["PERFAGENT_TEST_FOLDER"])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
perfagent.attach(model, optimizer, project="test", name="absent")


def wait_for_a_lock() -> None:
    while not (folder / "go").exists():
        time.sleep(0.2)


for step in range(1, 16):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    if rank == 1 and step == 12:
        wait_for_a_lock()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.1)
perfagent.finish()
dist.destroy_process_group()
