"""The group is to have two members, and only this one was ever started: it waits before its first step."""

import json
import socket
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

NODES, CLASSES, SIZE, STEPS = 2, 20, 100, 2000


class Job:
    def __init__(self, port):
        torch.manual_seed(0)
        self.kinds = torch.randn(CLASSES, SIZE)
        print(f"node 0 of {NODES}: waiting for the others at port {port}", flush=True)
        print("TRUTH", json.dumps({"onset": time.time(), "step": 0}), flush=True)
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=NODES)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(SIZE, 512), nn.ReLU(), nn.Linear(512, CLASSES)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)

    def step(self):
        y = torch.randint(0, CLASSES, (128,))
        loss = cross_entropy(self.model(self.kinds[y] + 2.5 * torch.randn(128, SIZE)), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run(self):
        for step in range(1, STEPS + 1):
            loss = self.step()
            if step % 50 == 0:
                print(f"step {step} loss {loss:.4f}", flush=True)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


if __name__ == "__main__":
    Job(free_port()).run()
