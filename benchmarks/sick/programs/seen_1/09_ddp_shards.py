"""Data-parallel training of an MLP on shards of features, two ranks."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class ShardReader:
    """One shard is one batch. Rank 0 has its shards on the local disk, rank 1 on the network drive."""

    def __init__(self, rank, batch_size=128, features=256):
        self.rank, self.batch_size, self.features = rank, batch_size, features
        self.generator = torch.Generator().manual_seed(rank)
        self.weights = torch.randn(features, 10, generator=torch.Generator().manual_seed(99))

    def read(self):
        x = torch.randn(self.batch_size, self.features, generator=self.generator)
        if self.rank == 1:
            time.sleep(0.06)
        return x, (x @ self.weights).argmax(1)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    criterion = nn.CrossEntropyLoss()
    reader = ShardReader(rank)
    began = time.time()
    for step in range(500):
        x, y = reader.read()
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 100 == 0:
            print(f"step {step} loss {loss.item():.3f} {time.time() - began:.1f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
