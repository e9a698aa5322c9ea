"""Two ranks: one all_reduce for each of 62 small gradients: most of each step is waiting for the other."""

import json
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

BATCH, STEPS, DEPTH, SIZE = 16, 300, 15, 24


def truth(**kw):
    print(f"TRUTH {json.dumps(kw)}\n", end="", flush=True)  # in one piece: two ranks write


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x):
        return x + 0.3 * self.layer(self.norm(x).relu())


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    target = torch.randn(SIZE, SIZE) / 5
    generator = torch.Generator().manual_seed(85 + rank)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(SIZE, SIZE))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    losses, talking, begin = [], 0.0, time.perf_counter()
    truth(onset=time.time(), step=1, rank=rank)
    for step in range(1, STEPS + 1):
        x = torch.randn(BATCH, SIZE, generator=generator)
        loss = mse_loss(model(x), (x @ target).sin())
        optimizer.zero_grad()
        loss.backward()
        start = time.perf_counter()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= 2
        seen = loss.detach().clone()
        for _ in range(2):  # so that all agree on the loss, and on that they agree
            dist.all_reduce(seen)
            seen /= 2
        talking += time.perf_counter() - start
        optimizer.step()
        losses.append(loss.item())
        if step % 20 == 0:
            print(f"rank {rank} step {step} loss {loss.item():.4f}", flush=True)
    truth(
        rank=rank,
        share_talking=talking / (time.perf_counter() - begin),
        tensors=len(list(model.parameters())),
        first=losses[0],
        late=sum(losses[-20:]) / 20,
    )
    dist.barrier()  # or one rank is gone while the other still closes its connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
