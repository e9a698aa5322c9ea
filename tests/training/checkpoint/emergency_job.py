"""A training that is interrupted: `python emergency_job.py FOLDER MODE`. It makes a step for each line on standard
input."""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resumable import batches, small_loop
from torch import nn

import perfagent
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.loop import loop


def job(folder: Path, mode: str) -> None:
    torch.set_num_threads(1)
    if mode == "handler":
        signal.signal(signal.SIGTERM, lambda signum, frame: (print("mine", signum, flush=True), sys.exit(7)))
    if mode == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grace_s = 0.5 if mode == "grace" else 60.0
    training = small_loop(folder, every=None, emergency=True, grace_s=grace_s, asynchronous=mode == "asynchronous")
    if mode == "in the step":
        training.optimizer.__class__ = Breaking
        del training.optimizer.step  # the scheduler's, which calls the class's as it was
    for inputs, targets in training.batches(batches(), epochs=99):
        print(training.step_count, flush=True)
        line = sys.stdin.readline().strip()
        if line == "end":
            break
        if line == "raise":
            raise ValueError("broken on purpose")
        with training.forward():
            loss = (training.model(inputs) - targets).square().mean()
        training.backward(loss)
        training.step()
    if mode == "late":
        os.kill(os.getpid(), signal.SIGTERM)
    training.checkpoint.close()  # type: ignore[union-attr]
    print(
        "closed", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, sys.excepthook is sys.__excepthook__, flush=True
    )


class Breaking(torch.optim.AdamW):
    """Fails in its third step, after the weights were changed."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.steps += 1
        if self.steps == 3:
            raise ValueError("broken on purpose, half-way")


def of_two(folder: Path, mode: str) -> None:
    """One of two ranks, which steps on and on."""
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = loop(model, optimizer, checkpoint=Checkpoint(folder))
    for inputs, targets in training.batches(batches(), epochs=10**6):
        if training.step_count == 3:
            print(3, flush=True)
        if mode == "exception" and training.step_count == 5:
            raise ValueError(f"broken on purpose on rank {rank}")
        with training.forward():
            loss = (model(inputs) - targets).square().mean()
        training.backward(loss)
        training.step()


if __name__ == "__main__":
    if "PERFAGENT_RECORD" in os.environ:
        perfagent.attach()
    (of_two if "RANK" in os.environ else job)(Path(sys.argv[1]), sys.argv[2])
