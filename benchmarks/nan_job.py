"""A small training job whose loss becomes NaN at a given step: `python nan_job.py STEP AFTER_S`.

Prints `NAN <Unix seconds>` when the step with the NaN loss begins its backward pass, then goes on for AFTER_S seconds.
"""

from __future__ import annotations

import sys
import time

import torch

import perfagent


def main(nan_step: int, after_s: float) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    perfagent.attach(model, optimizer, project="nan-latency")
    step, end = 0, float("inf")
    while time.monotonic() < end:
        step += 1
        loss = model(torch.randn(16, 32)).square().mean()
        if step == nan_step:
            loss = loss * float("nan")
            end = time.monotonic() + after_s
            print(f"NAN {time.time()!r}", flush=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.005)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
