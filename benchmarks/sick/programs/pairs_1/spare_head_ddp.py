"""Two ranks: from step 301 on a spare head takes no part in the loss, and DDP refuses the second step with it."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

CLASSES, BATCH, WARM, STEPS, SIZE, FIND_UNUSED = 9, 64, 300, 600, 96, False


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


class Net(nn.Module):
    def __init__(self, spare):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SIZE, 640), nn.ReLU(), nn.Linear(640, 640), nn.ReLU())
        self.head = nn.Linear(640, CLASSES)
        self.spare = nn.Linear(640, 2) if spare else None

    def forward(self, x, both):
        h = self.body(x)
        return self.head(h), self.spare(h) if both else None


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    kinds = torch.randn(CLASSES, SIZE)
    generator = torch.Generator().manual_seed(82 + rank)
    model = DistributedDataParallel(Net(spare=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    losses = []
    for step in range(1, STEPS + 1):
        if step == WARM + 1:
            net = Net(spare=True)
            net.load_state_dict(model.module.state_dict(), strict=False)
            model = DistributedDataParallel(net, find_unused_parameters=FIND_UNUSED)
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        y = torch.randint(0, CLASSES, (BATCH,), generator=generator)
        x = kinds[y] + 3 * torch.randn(BATCH, SIZE, generator=generator)
        if step == WARM + 2:
            truth(onset=time.time(), step=step, rank=rank)
        logits, _ = model(x, both=False)
        loss = cross_entropy(logits, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    truth(finished=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
