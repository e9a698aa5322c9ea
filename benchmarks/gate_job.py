"""A training job for benchmarks/gate.py: `python gate_job.py STEPS [KIND PCT]`. A step takes some milliseconds; KIND and PCT make
it longer by a known share.

KIND says where: `forward` (work in the model), `wait` (for data), `collate` (work on data), `optimizer` (work beside it). What
waits or works longer is a share of the median of its own steps without it, so that it is exact on any machine. `layers` is a
model with one more layer, which takes longer forward, backward and in the optimizer: `share_of_a_layer` measures how much.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator
from statistics import median

import torch
from torch import nn

LAYERS, WIDTH, BATCH = 20, 192, 128


class Longer(nn.Module):
    """Makes a step longer by a share of what it takes otherwise. As a module it works in the forward pass."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.own_s: deque[float] = deque(maxlen=50)
        self.extra_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.work()
        return x

    def wait(self) -> None:
        self.extra_s = self.share * median(self.own_s or [0.0])
        time.sleep(self.extra_s)

    def work(self) -> None:
        """Processor time, whoever else has the processors."""
        self.extra_s = self.share * median(self.own_s or [0.0])
        until = time.thread_time() + self.extra_s
        while time.thread_time() < until:
            pass


def batches(steps: int, longer: Longer, kind: str) -> Iterator[torch.Tensor]:
    for _ in range(steps):
        batch = torch.randn(BATCH, WIDTH)
        if kind == "wait":
            longer.wait()
        elif kind == "collate":
            longer.work()
        yield batch


def model_of(layers: int) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def share_of_a_layer(steps: int) -> float:
    """By which share of its processor time a step with one more layer is longer: the median over pairs of steps in turn."""
    torch.set_num_threads(1)
    models = [model_of(LAYERS), model_of(LAYERS + 1)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3) for model in models]
    ratios = []
    for _ in range(steps):
        used_s = []
        for model, optimizer in zip(models, optimizers, strict=True):
            began = time.thread_time()
            batch = torch.randn(BATCH, WIDTH)
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            used_s.append(time.thread_time() - began)
        ratios.append(used_s[1] / used_s[0])
    return median(ratios[steps // 10 :]) - 1


def main(steps: int, kind: str = "", percent: float = 0.0) -> None:
    import perfagent

    torch.manual_seed(0)
    torch.set_num_threads(1)
    longer = Longer(percent / 100)
    model = model_of(LAYERS + (kind == "layers"))
    if kind == "forward":
        model.append(longer)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    run = perfagent.attach(model, optimizer)
    clock = time.perf_counter if kind == "wait" else time.thread_time
    began = clock()
    for batch in run.batches(batches(steps, longer, kind)):
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        if kind == "optimizer":
            longer.work()
        optimizer.step()
        optimizer.zero_grad()
        now = clock()
        longer.own_s.append(now - began - longer.extra_s)
        began = now


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:3], *map(float, sys.argv[3:4]))
