"""perfagent's loop over DeepSpeed's engine, with a configuration that was checked for conflicts.

    pip install deepspeed
    torchrun --nproc-per-node 2 examples/zero.py --stage 2 --steps 100

Stage 1 divides the optimizer's state over the ranks, 2 gradients too, 3 parameters too. An optimizer of torch's own
needs no compiler. On a machine without a GPU DeepSpeed wants DS_ACCELERATOR=cpu.
"""

import argparse
import os

import torch

import perfagent

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3))
options = parser.parse_args()
cuda = torch.cuda.is_available()
if not cuda:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed  # noqa: E402 - reads the environment when it is imported

if not cuda:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # else it compiles C++ for a minute
deepspeed.init_distributed("nccl" if cuda else "gloo")

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = perfagent.zero_config(
    options.stage, micro_batch=64, precision="bf16" if cuda else "fp32", grad_accum=2, clip_norm=1.0
)
engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def batches(count: int):
    torch.manual_seed(torch.distributed.get_rank())
    for _ in range(count):
        x = torch.randn(64, 64)
        yield x, x[:, :8].sum(dim=1, keepdim=True).sin()


perfagent.attach(engine, project="examples", name="zero")
loop = perfagent.loop(engine)  # accumulation and clipping are the engine's
for x, y in loop.batches(batches(2 * options.steps), epochs=1, steps=options.steps):
    with loop.forward():
        loss = torch.nn.functional.mse_loss(engine(x).float(), y)
    loop.backward(loss, num_items=len(x))
    loop.step()
torch.distributed.destroy_process_group()
