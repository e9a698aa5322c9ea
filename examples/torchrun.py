"""perfagent in a job of several processes; all ranks together are one run.

torchrun --nproc-per-node 2 examples/torchrun.py --steps 200
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
options = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

perfagent.attach(model, optimizer, project="examples", name="torchrun")

torch.manual_seed(dist.get_rank())
for _ in range(options.steps):
    inputs = torch.randn(64, 64, device=device)
    loss = torch.nn.functional.mse_loss(model(inputs), inputs[:, :8].sum(dim=1, keepdim=True).sin())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
