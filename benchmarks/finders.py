"""What the finders are worth: the memory estimate beside torch.profiler's peak, and workers found for data that waits.

    python benchmarks/finders.py [--quick] [--write]

Exits with 1 when an estimate is more than 10 % off, or when 8 workers are not what is found for data of which each
sample waits 10 ms. (How much faster an epoch over such data gets with 8 workers than with 2 is measured, and held to 4
times, by `scripts/bench techniques`; between two batches 4 is the most there is.) --write puts the tables into
docs/guides/finders.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import memory_models as trainings
import tables
import torch
from torch.utils.data import DataLoader, Dataset

from perfagent_loop.estimates.memory import estimate_memory
from perfagent_loop.search.workers import search_num_workers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "finders.md"
MOST_OFF, MOST_WORKERS = 0.10, 8
WAIT_S, BATCH = 0.010, 16


class Waiting(Dataset[int]):
    """Samples that come after 10 ms, as from a disk or a network."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> int:
        time.sleep(WAIT_S)
        return index


def memory() -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether all estimates are near enough."""
    cases = [
        *trainings.MODELS,
        "gpt/bf16",
        "mlp/bf16",
        "convolutions/bf16",
        "autoencoder/bf16",
        "gpt/checkpointed",
    ]
    done = subprocess.run([sys.executable, trainings.__file__, *cases], capture_output=True, text=True, check=True)
    measured = {line["name"]: line["peak_bytes"] for line in map(json.loads, done.stdout.splitlines()[-len(cases) :])}
    rows, good = [], True
    for case in cases:
        name, _, how = case.partition("/")
        model, batch, optimizer = trainings.MODELS[name]()
        begin = time.perf_counter()
        estimate = estimate_memory(
            model,
            batch,
            optimizer=optimizer,
            precision="bf16" if how == "bf16" else "fp32",
            checkpointing=how == "checkpointed",
        )
        took = time.perf_counter() - begin
        off = estimate.total_bytes / measured[case] - 1
        good &= abs(off) <= MOST_OFF
        sizes = [f"{size / 2**20:.2f} MiB" for size in (measured[case], estimate.total_bytes)]
        rows.append([case.replace("/", ", "), *sizes, f"{100 * off:+.2f} %", f"{took:.1f} s"])
    return rows, good


def workers(quick: bool) -> tuple[list[list[str]], bool]:
    """Rows of the table, and whether the most workers are found to be the best."""

    def loader(number: int) -> DataLoader[Any]:
        return DataLoader(Waiting(), batch_size=BATCH, num_workers=number)

    found, trials = search_num_workers(loader, [0, 1, 2, 4, MOST_WORKERS], batches=16 if quick else 64, most_s=20.0)
    seconds = {trial.workers: trial.seconds for trial in trials if trial.seconds is not None}
    rows = [[str(number), f"{1000 * one:.0f} ms", f"{seconds[2] / one:.2f}"] for number, one in seconds.items()]
    rows.append([f"find_num_workers: {found}", "", ""])
    return rows, found == MOST_WORKERS


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, near = memory()
    memories = tables.table(["training", "torch.profiler", "estimate", "off by", "estimated in"], rows)
    rows, fast = workers(arguments.quick)
    loaders = tables.table(["workers", "a batch every", "times as fast as 2"], rows)
    print(f"{memories}\n\n{loaders}\n")
    print(f"every estimate within {MOST_OFF:.0%}: {'met' if near else 'NOT MET'}")
    print(f"{MOST_WORKERS} workers found: {'met' if fast else 'NOT MET'}")
    if arguments.write:
        cores = f"{os.cpu_count()} cores, torch {torch.__version__}"
        tables.replace("memory", f"{memories}\n\nMeasured on {cores}.", PAGE)
        tables.replace("workers", loaders, PAGE)
    return 0 if near and fast else 1


if __name__ == "__main__":
    sys.exit(main())
