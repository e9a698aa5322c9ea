"""One process that reads a cached dataset through a DataLoader again and again: `SEED=1 cache_job.py FOLDER ROUNDS`.

Prints the sum of what it read in each round, and how many entries it found damaged.
"""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from perfagent_loop.data.cache import CachedDataset

SAMPLES = 40


class Prepared(Dataset[Any]):
    """Each sample is its number, many times; made anew it is the same."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.full((500,), index), "name": f"sample {index}"}


def main() -> None:
    folder, rounds, seed = sys.argv[1], int(sys.argv[2]), int(os.environ["SEED"])
    torch.set_num_threads(1)
    dataset = CachedDataset(Prepared(), folder, version="1")
    for number in range(rounds):
        order = [*range(SAMPLES)]
        random.Random(seed + number).shuffle(order)
        loader = DataLoader(dataset, batch_size=4, sampler=order, num_workers=2 if number == 0 else 0)
        total = sum(int(batch["x"].sum()) for batch in loader)
        print(total, dataset.cache.damaged, flush=True)


if __name__ == "__main__":
    main()
