"""A job for torchrun: DistributedDataParallel over gloo, one line of perfagent: `torchrun --nproc-per-node 2
two_ranks.py 30`."""

import os
import sys

import torch
import torch.distributed as dist

import perfagent

dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
perfagent.attach(model, optimizer, name="two ranks")

torch.manual_seed(int(os.environ["RANK"]))
for _ in range(int(sys.argv[1])):
    loss = model(torch.randn(8, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
