"""Asynchronous checkpoints: how long a training waits for `perfagent.Checkpoint`, in both modes, and for torch.save."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from perfagent.errors import ConfigError
from perfagent_loop.checkpoint import Checkpoint
from perfagent_tools.bench.machine import described
from perfagent_tools.bench.measuring import seconds
from perfagent_tools.bench.report import Figure, Report, times

__all__ = ["measure", "state_of"]


def state_of(mib: int, device: torch.device) -> dict[str, Any]:
    """About so many MiB: weights and the two moments of AdamW, a third each."""
    side = 1024
    layers = max(1, mib * 2**20 // (3 * 4 * side * side))
    model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False, device=device) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def measure(device: torch.device, *, quick: bool = False, mib: int = 0, folder: str | None = None) -> Report:
    """folder: on the disk that checkpoints go to; one of its own in the system's folder for temporary files without
    it."""
    mib = mib or (12 if quick else 384)
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"--folder is {folder!r}, and there is no such folder; give one on the disk that checkpoints go to"
        )
    with tempfile.TemporaryDirectory(prefix="perfagent-bench-", dir=folder) as inside:
        found = _rounds(state_of(mib, device), Path(inside), device, rounds=2 if quick else 9)
    took = {name: statistics.median(values) for name, values in found.items()}
    ratio = took["synchronous"] / took["asynchronous"]
    return Report(
        name="async-checkpoint",
        device=device.type,
        machine=described(device),
        setup=f"a state of {mib} MiB; each checkpoint is written, synced, summed and renamed",
        figures={
            "blocked": Figure(
                ratio,
                f"an asynchronous checkpoint blocks the training {times(ratio)} less",
                "What stays is the copy of the state to host memory; what goes is the disk. The ratio is therefore that of "
                "memory (or of the bus, from a GPU) to the disk: large where the disk is slow, small where it is fast. It "
                "helps until checkpoints come faster than they are written: then each waits for the one before.",
            ),
        },
        head=["way", "ms (median)", "from", "to"],
        rows=[
            [name, *(f"{1000 * value:.0f}" for value in (took[name], min(values), max(values)))]
            for name, values in found.items()
        ],
    )


def _rounds(state: dict[str, Any], folder: Path, device: torch.device, *, rounds: int) -> dict[str, list[float]]:
    """Seconds by way. The first round makes files and memory, and is left out."""
    waiting, beside = Checkpoint(folder / "waiting", keep=2), Checkpoint(folder / "beside", keep=2, asynchronous=True)
    names = ("torch.save alone", "synchronous", "asynchronous", "asynchronous, until on disk")
    found: dict[str, list[float]] = {name: [] for name in names}
    try:
        for number in range(rounds + 1):
            ways: dict[str, Callable[[], object]] = {
                "torch.save alone": lambda: torch.save(state, folder / "alone.pt"),
                "synchronous": lambda number=number: waiting.save(number, state),  # type: ignore[misc]
                "asynchronous": lambda number=number: beside.save(number, state),  # type: ignore[misc]
            }
            took = {name: seconds(call, device) for name, call in ways.items()}
            took["asynchronous, until on disk"] = took["asynchronous"] + seconds(beside.wait, device)
            if number:
                for name, value in took.items():
                    found[name].append(value)
    finally:
        waiting.close()
        beside.close()
    return found
