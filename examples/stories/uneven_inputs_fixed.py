"""Two ranks of DistributedDataParallel. Each reads its own files, and they have unequal numbers of batches."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)
torch.set_num_threads(1)


def batches():
    for _ in range((200, 160)[rank]):
        time.sleep(0.02)  # stands for reading
        x = torch.randn(16, 32)
        yield x, x[:, :2].sum(dim=1, keepdim=True)


model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
criterion = nn.MSELoss()

with model.join():
    for x, y in batches():
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
dist.barrier()  # all ranks validate together
print(f"rank {rank}: loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
