"""perfagent's loop over FSDP2: parameters, gradients and moments are divided over the ranks, block by block.

    torchrun --nproc-per-node 2 examples/fsdp2.py --steps 100

The optimizer is made after sharding: it steps on the shards.
"""

import argparse
import os

import torch
import torch.distributed as dist

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
blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4)]
model = torch.nn.Sequential(torch.nn.Sequential(*blocks), torch.nn.Linear(64, 1)).to(device)
model = perfagent.fsdp(model, precision="bf16" if cuda else "fp32")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def batches(count: int):
    torch.manual_seed(dist.get_rank())
    for _ in range(count):
        x = torch.randn(64, 64)
        yield x, x[:, :8].sum(dim=1, keepdim=True).sin()


perfagent.attach(model, optimizer, project="examples", name="fsdp2")
loop = perfagent.loop(model, optimizer, grad_accum=2, clip_norm=1.0)
for x, y in loop.batches(batches(2 * options.steps), epochs=1, steps=options.steps):
    with loop.forward():
        loss = torch.nn.functional.mse_loss(model(x), y)
    loop.backward(loss, num_items=len(x))
    loop.step()
dist.destroy_process_group()
