"""One of two ranks of a DDP job that would train for minutes: `python stopped.py FOLDER WAY`. It writes down, in
FOLDER/RANK.json, its last step, when the first NaN came, and how it ended. WAY: plain, reads or loop."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import perfagent

folder, way = Path(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = perfagent.attach(model, optimizer, project="test", name=way, stoppable=way == "plain")
ended: dict[str, Any] = {"step": 0, "how": "by itself"}


def batch(step: int) -> torch.Tensor:
    time.sleep(0.02)
    if step == 100 and rank == 1:
        ended["nan"] = time.time()
        return torch.full((4, 8), float("nan"))
    return torch.randn(4, 8)


def by_hand() -> None:
    for step in range(1, 1500):
        model(batch(step)).square().mean().backward()
        ended["step"] = step
        optimizer.step()
        optimizer.zero_grad()
        if way == "reads" and run.should_stop:
            ended["how"] = "by should_stop"
            return


def by_loop() -> None:
    checkpoint = perfagent.Checkpoint(folder / "checkpoints", every=80)
    loop = perfagent.loop(model, optimizer, checkpoint=checkpoint)
    for step in loop.batches([*range(1, 1500)]):
        with loop.forward():
            loss = model(batch(int(step))).square().mean()
        loop.backward(loss)
        loop.step()
        ended["step"] = loop.step_count
    checkpoint.close()
    ended["how"] = "by loop"


try:
    by_loop() if way == "loop" else by_hand()
except perfagent.Stopped as stopped:
    ended["how"] = str(stopped)
    raise
finally:
    ended["at"] = time.time()
    (folder / f"{rank}.json").write_text(json.dumps(ended))
