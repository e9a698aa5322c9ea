"""A training that is interrupted: `python emergency_job.py FOLDER MODE`. It makes a step for each line on standard
input."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from resumable import small_loop, train
from torch import nn

import perfagent
from perfagent_loop.checkpoint import Checkpoint
from perfagent_loop.loop import loop


def job(folder: Path, mode: str) -> None:
    if mode == "handler":
        signal.signal(signal.SIGTERM, lambda signum, frame: (print("mine", signum, flush=True), sys.exit(7)))
    if mode == "ignored":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    training = small_loop(folder, every=None, emergency=True, grace_s=0.5 if mode == "grace" else 60.0)
    if mode == "in the step":  # the third fails, after the weights were changed
        left = ["no", "no", "yes"]
        training.optimizer.register_step_post_hook(lambda *_: 1 / (left.pop(0) == "no"))

    def asked() -> float:
        print(training.step_count, flush=True)
        match sys.stdin.readline().strip():
            case "end":
                raise EOFError
            case "raise":
                raise ValueError("broken on purpose")
        return 1.0

    with contextlib.suppress(EOFError):
        train(training, epochs=99, before=asked)
    if mode == "late":
        os.kill(os.getpid(), signal.SIGTERM)
    training.checkpoint.close()  # type: ignore[union-attr]
    print("closed", signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, sys.excepthook is sys.__excepthook__)


def of_two(folder: Path) -> None:
    """One of two ranks, which steps on and on."""
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 2)))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = loop(model, optimizer, checkpoint=Checkpoint(folder))
    train(training, steps=3)
    print(3, flush=True)
    train(training, epochs=10**6)


if __name__ == "__main__":
    perfagent.attach()
    if "RANK" in os.environ:
        of_two(Path(sys.argv[1]))
    else:
        job(Path(sys.argv[1]), sys.argv[2])
