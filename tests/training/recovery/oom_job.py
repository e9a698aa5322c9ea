"""One of two ranks; only rank 1 runs out of memory. Prints what became of it as JSON."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perfagent.training.loop import loop
from perfagent.training.split_on_oom import SplitOnOom

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(2)
plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
inputs, targets = torch.randn(16, 4).double(), torch.randn(16, 2).double()
(plain(inputs) - targets).square().mean().backward()
expected = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
plain.zero_grad()

model: Any = DistributedDataParallel(plain)
training = loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
split = SplitOnOom(training)
mine = (inputs[8 * rank : 8 * rank + 8], targets[8 * rank : 8 * rank + 8])


def compute(piece: tuple[Tensor, Tensor]) -> Tensor:
    loss: Tensor = (model(piece[0]) - piece[1]).square().mean()
    if rank == 1 and len(piece[0]) > 2:
        loss.backward()
        raise torch.OutOfMemoryError("CUDA out of memory")
    return loss


split.backward(mine, compute)
found = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
training.step()
with training.forward():  # an ordinary step afterwards still averages by itself
    after = (model(mine[0]) - mine[1]).square().mean()
training.backward(after)
training.step()
last = torch.cat([p.detach().flatten() for p in plain.parameters()])

# a loader without a length, of which nobody knows whether the ranks' are equal
for _ in training.batches(iter([None])):
    split.backward(mine, compute)
    training.step()
streamed = torch.cat([p.detach().flatten() for p in plain.parameters()])

plain.zero_grad()
rows = 4 * rank + 4  # ranks of unequal batches
start = 0 if rank == 0 else 4
(plain(inputs[:12]) - targets[:12]).square().mean().backward()
of_all = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
plain.zero_grad()
counted = SplitOnOom(training, items=lambda piece: len(piece[0]))
counted.backward((inputs[start : start + rows], targets[start : start + rows]), compute)
weighed = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None])
print(
    json.dumps(
        {
            "pieces": split.pieces,
            "gradients": found.tolist(),
            "off": float((found - expected).abs().max()),
            "after": last.tolist(),
            "stream_moved": float((streamed - last).abs().max()),
            "off_by_items": float((weighed - of_all).abs().max()),
        }
    )
)
dist.destroy_process_group()
