"""The data part: how full batches are, how exact the data wait is, and what caches and mapped files cost.

    PYTHONPATH=benchmarks python benchmarks/data/measure.py [--quick] [--write]

The exit status is 1 if one of three limits is missed. Packing must fill at least 99 %. It must take less than a second
for 50,000 lengths. For a loader that takes 50 ms a batch, the measured data wait must be right to 5 %.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tables
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import perfagent
from perfagent_loop.data.cache import CachedDataset
from perfagent_loop.data.length_batches import LengthBucketBatchSampler, PackedBatchSampler, TokenBudgetBatchSampler
from perfagent_loop.data.mapped import map_tokens
from perfagent_loop.data.packing import fill, pack, pack_stream
from perfagent_loop.data.prefetch import Prefetcher

CAPACITY = 2048
BATCH = 16
WAIT_S = 0.05
MOST_OFF_PCT = 5.0


def text_lengths(number: int) -> list[int]:
    draw = random.Random(0)
    return [max(1, min(CAPACITY, int(draw.lognormvariate(5.5, 1)))) for _ in range(number)]


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this thread, and what came of it."""
    began = time.thread_time()
    made = call()
    return time.thread_time() - began, made


# ---- how full


def fills(lengths: list[int]) -> list[tuple[str, float, float]]:
    """What it is, the share of tokens, CPU seconds."""
    total = sum(lengths)

    def padded(batches: Sequence[Sequence[int]]) -> float:
        return total / sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)

    order = [*range(len(lengths))]
    random.Random(1).shuffle(order)
    at_random = [order[begin : begin + BATCH] for begin in range(0, len(order), BATCH)]
    rows = [
        ("padded to the longest of all", total / (len(lengths) * max(lengths)), 0.0),
        (f"random batches of {BATCH}, padded to their longest", padded(at_random), 0.0),
    ]
    samplers: list[tuple[str, Callable[[], Any]]] = [
        (f"LengthBucketBatchSampler, {BATCH} samples", lambda: LengthBucketBatchSampler(lengths, BATCH)),
        ("TokenBudgetBatchSampler, 16,384 tokens", lambda: TokenBudgetBatchSampler(lengths, 16_384)),
        (f"PackedBatchSampler, {CAPACITY} tokens", lambda: PackedBatchSampler(lengths, CAPACITY)),
    ]
    for name, make in samplers:
        took, share = timed(lambda make=make: make().fill)
        rows.append((name, share, took))
    took, packed = timed(lambda: pack(lengths, CAPACITY))
    rows.append(
        (
            f"pack, {len(packed):,} rows (at least {-(-total // CAPACITY):,} are needed)",
            fill(packed, lengths, CAPACITY),
            took,
        )
    )
    for window in (500, 2000):
        took, packed = timed(
            lambda window=window: [
                *pack_stream(range(len(lengths)), CAPACITY, length=lengths.__getitem__, window=window)
            ]
        )
        rows.append((f"pack_stream, window of {window}", fill(packed, lengths, CAPACITY), took))
    return rows


# ---- data wait


class Late(Dataset[torch.Tensor]):
    """Each batch takes WAIT_S by the clock."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(WAIT_S)
        return torch.full((64, 64), float(index))


def data_wait(batches: int, folder: Path, through: Callable[[Any], Iterator[Any]]) -> float:
    """The median of `phase/data_s`, in seconds."""
    from perfagent.delivery.spool import Spool

    os.environ["PERFAGENT_RECORD"] = str(folder)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = perfagent.attach(model, optimizer)
    for batch in through(DataLoader(Late(batches), batch_size=None)):
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
    waits: list[float] = []
    for source in folder.iterdir():
        spool = Spool.open(source, recording=True)
        while (outgoing := spool.next()) is not None:
            for group in outgoing.groups:
                if "phase/data_s" in group.values:
                    waits += group.column("phase/data_s")
            spool.ack(outgoing.seq)
        spool.abandon()
    return statistics.median(waits)


# ---- caches and mapped files


class Prepared(Dataset[Any]):
    """An image of 3 x 64 x 64 that takes 5 ms to prepare."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Any]:
        until = time.perf_counter() + 0.005
        while time.perf_counter() < until:
            pass
        return {"image": torch.full((3, 64, 64), float(index)), "label": index % 10}


def reading(folder: Path, samples: int) -> dict[str, float]:
    """Microseconds a sample."""
    dataset = CachedDataset(Prepared(), folder / "cache")
    order = [*range(samples)]
    random.Random(0).shuffle(order)

    def all_of(source: Any) -> float:
        began = time.perf_counter()
        for index in order:
            source[index]
        return 1e6 * (time.perf_counter() - began) / samples

    made, kept = all_of(dataset), all_of(dataset)
    tokens = map_tokens(folder / "tokens.bin", (range(index % 700 + 1) for index in range(samples)), dtype=torch.uint16)
    return {"prepared, and written": made, "from the cache": kept, "a document of map_tokens": all_of(tokens)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer batches and samples; all lengths")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)

    rows = fills(text_lengths(50_000))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        batches = 20 if options.quick else 100
        waits = {
            "the DataLoader": data_wait(batches, folder / "plain", iter),
            "a Prefetcher on the CPU": data_wait(
                batches, folder / "ahead", lambda loader: iter(Prefetcher(loader, "cpu"))
            ),
        }
        figures = reading(folder, 100 if options.quick else 400)

    text = "\n".join(
        [
            f"{tables.machine('torch')}. 50,000 lengths as texts have them (log-normal, mean 386, at most {CAPACITY}). Tokens: "
            "share of what is computed that is no padding. CPU s: to make the batches of an epoch.",
            "",
            tables.table(
                ["batches", "tokens", "CPU s"],
                [[what, f"{100 * share:.2f} %", tables.figure(took) if took else "-"] for what, share, took in rows],
            ),
            "",
            f"Data wait of a loader that sleeps {1000 * WAIT_S:.0f} ms per batch, as shown by the agent (median of {batches}): "
            + ", ".join(f"{1000 * wait:.1f} ms through {through}" for through, wait in waits.items())
            + ".",
            "",
            "A sample in random order, on one core: "
            + ", ".join(f"{tables.figure(took)} µs {what}" for what, took in figures.items())
            + ". The cache's samples have 48 KiB and a checksum that is checked each time.",
        ]
    )
    print(text)
    if options.write:
        tables.replace("data", text)
    packed = next(row for row in rows if row[0].startswith("pack,"))
    missed = [
        what for what, bad in (("filled under 99 %", packed[1] < 0.99), ("took a second", packed[2] >= 1.0)) if bad
    ]
    missed += [
        f"data wait through {through}" for through, wait in waits.items() if abs(wait / WAIT_S - 1) * 100 > MOST_OFF_PCT
    ]
    for one in missed:
        print(f"missed: {one}", file=sys.stderr)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
