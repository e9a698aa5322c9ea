"""One rank of a training on batches by token budget: `RANK=... ranks_job.py STORE WORLD`; prints its steps and what it
saw."""

from __future__ import annotations

import functools
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import perfagent
from perfagent.training.data.collating import pad


def main() -> None:
    store, rank, world = sys.argv[1], int(os.environ["RANK"]), int(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    lengths = [number * 7 % 30 + 1 for number in range(61)]
    dataset: list[Any] = [{"input_ids": torch.full((length,), number)} for number, length in enumerate(lengths)]
    sampler = perfagent.TokenBudgetBatchSampler(lengths, 120)
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, collate_fn=functools.partial(pad, pad_id=63))
    torch.manual_seed(0)
    model = perfagent.ddp(nn.Sequential(nn.Embedding(64, 4), nn.Linear(4, 64)))
    loop = perfagent.loop(model, torch.optim.SGD(model.parameters(), lr=0.5), grad_accum=3)
    seen: list[list[int]] = []
    for epoch in range(2):
        seen.append([])
        for batch in loop.batches(loader):
            seen[epoch] += [int(row[0]) for row in batch["input_ids"]]
            with loop.forward():
                loss = nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            loop.backward(loss, batch["labels"].ne(-100).sum())
            loop.step()
    weights = float(sum(parameter.detach().double().sum() for parameter in model.parameters()))
    print(json.dumps({"steps": loop.step_count, "seen": seen, "weights": weights}), flush=True)
    dist.destroy_process_group()
    # the model drops torch's gloo group, and hung in that: its stacks show one of torch's threads without the GIL
    os._exit(0)


if __name__ == "__main__":
    main()
