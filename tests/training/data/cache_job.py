"""Reads a cached dataset through a DataLoader again and again: `SEED=1 cache_job.py FOLDER ROUNDS`. Prints the sum of what it
read in each round, and how many entries it found damaged."""

from __future__ import annotations

import os
import random
import sys

import torch
from torch.utils.data import DataLoader

from perfagent_loop.data.cache import CachedDataset

SAMPLES = [{"x": torch.full((500,), index), "name": f"sample {index}"} for index in range(40)]

if __name__ == "__main__":
    torch.set_num_threads(1)
    dataset = CachedDataset(SAMPLES, sys.argv[1], version="1")
    for number in range(int(sys.argv[2])):
        order = [*range(len(SAMPLES))]
        random.Random(int(os.environ["SEED"]) + number).shuffle(order)
        loader = DataLoader(dataset, batch_size=4, sampler=order, num_workers=2 if number == 0 else 0)
        print(sum(int(batch["x"].sum()) for batch in loader), dataset.cache.damaged, flush=True)
