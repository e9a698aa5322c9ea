"""perfagent's loop over DistributedDataParallel: gradients travel once a window, in buckets, compressed if you like.

torchrun --nproc-per-node 2 examples/ddp.py --steps 100
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
options = parser.parse_args()

cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
if cuda:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if cuda else "gloo")

torch.manual_seed(0)
inputs = torch.randn(8192, 64)
data = TensorDataset(inputs, inputs[:, :8].sum(dim=1, keepdim=True).sin())
loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))

model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).to(device)
model = perfagent.ddp(model, bucket_mb=25, static_graph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

perfagent.attach(model, optimizer, project="examples", name="ddp")
loop = perfagent.loop(model, optimizer, grad_accum=4, clip_norm=1.0)
for x, y in loop.batches(loader, epochs=None, steps=options.steps):
    with loop.forward():
        loss = torch.nn.functional.mse_loss(model(x), y)
    loop.backward(loss, num_items=len(x))
    loop.step()
dist.destroy_process_group()
