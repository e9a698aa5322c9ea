"""How long training waits for a checkpoint: `perfagent.Checkpoint`, synchronous and asynchronous, and torch.save alone.

    PYTHONPATH=benchmarks python benchmarks/checkpoint/measure.py [--quick] [--mib N] [--folder DIR] [--write]

One state (a model and the two moments of AdamW) is saved in turn in each way. torch.save alone does not sync, sum or
rename:
it is here to say what the disk takes. Exits with 1 if an asynchronous save does not block the training at least 3 times
less.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tables
import torch

from perfagent import Checkpoint

LEAST_RATIO = 3.0


def state_of(mib: int) -> dict[str, Any]:
    """A third of the bytes each: weights, first and second moments."""
    side = 1024
    layers = max(1, mib * 2**20 // (3 * 4 * side * side))
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(mib: int, rounds: int, folder: Path) -> dict[str, list[float]]:
    """Seconds by way. The first round of each makes files and memory, and is left out."""
    state = state_of(mib)
    waiting, beside = Checkpoint(folder / "waiting", keep=2), Checkpoint(folder / "beside", keep=2, asynchronous=True)
    found: dict[str, list[float]] = {
        "torch.save alone": [],
        "synchronous": [],
        "asynchronous, training waits": [],
        "asynchronous, until on disk": [],
    }
    for number in range(rounds + 1):
        seconds = {"torch.save alone": timed(lambda: torch.save(state, folder / "alone.pt"))}
        seconds["synchronous"] = timed(lambda number=number: waiting.save(number, state))
        seconds["asynchronous, training waits"] = timed(lambda number=number: beside.save(number, state))
        seconds["asynchronous, until on disk"] = seconds["asynchronous, training waits"] + timed(beside.wait)
        if number:
            for name, value in seconds.items():
                found[name].append(value)
    waiting.close()
    beside.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--mib", type=int, default=0)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    mib, rounds = options.mib or (48 if options.quick else 384), 3 if options.quick else 9
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-checkpoint-", dir=options.folder) as folder:
        found = measure(mib, rounds, Path(folder))
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratio = medians["synchronous"] / medians["asynchronous, training waits"]
    rows = [
        [name, f"{1000 * medians[name]:.0f}", f"{1000 * min(values):.0f} to {1000 * max(values):.0f}"]
        for name, values in found.items()
    ]
    text = (
        f"{tables.machine('torch')}. A state of {mib} MiB, {rounds} rounds, one thread.\n\n"
        + tables.table(["way", "ms (median)", "range"], rows)
        + f"\n\nAn asynchronous checkpoint blocks the training {ratio:.1f} times less."
    )
    print(text)
    if options.write and not options.quick:
        tables.replace("checkpoint", text)
    return 0 if ratio >= LEAST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
