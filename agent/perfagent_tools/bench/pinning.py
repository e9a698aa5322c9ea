"""Pinned memory: copies to the GPU from pageable and from page-locked memory, and a training fed from each.

Without a GPU nothing is copied and pinning cannot be judged. What is measured then is what a pageable copy costs before
the bus sees it: the driver first copies such memory into a locked buffer of its own, at the speed of this host's
memory.
"""

from __future__ import annotations

import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from perfagent_tools.bench.machine import described
from perfagent_tools.bench.measuring import in_turn, medians
from perfagent_tools.bench.report import Figure, Report, percent, times

__all__ = ["measure"]

_CONDITION = (
    "Helps with large batches of plain tensors and a device that waits for them; pinned memory is taken from the host for good, "
    "and copies overlap with computing only with non_blocking=True."
)


def measure(device: torch.device, *, quick: bool = False) -> Report:
    mib = 8 if quick else 128
    pageable = torch.ones(mib * 2**18)
    if device.type != "cuda":
        return _without_gpu(device, pageable, mib, rounds=2 if quick else 15)
    pinned, there = pageable.pin_memory(), torch.empty(mib * 2**18, device=device)
    copies = {
        "pageable": lambda: there.copy_(pageable),
        "pinned": lambda: there.copy_(pinned, non_blocking=True),
    }
    took = medians(in_turn(copies, device, rounds=2 if quick else 15))
    trained = _training(device, quick=quick)
    copy, training = took["pageable"] / took["pinned"], 100 * (trained["pageable"] / trained["pinned"] - 1)
    return Report(
        name="pinning",
        device=device.type,
        machine=described(device),
        setup=f"copies of {mib} MiB; training: a convolution on batches of 64 images of 224 x 224, fp32",
        figures={
            "copy": Figure(copy, f"pinned memory is copied {times(copy)} as fast", _CONDITION),
            "training": Figure(training, f"training from it is {percent(training)} faster", _CONDITION),
        },
        head=["memory", "copy GiB/s", "ms a training step"],
        rows=[[name, f"{mib / 1024 / took[name]:.1f}", f"{1000 * trained[name]:.1f}"] for name in copies],
    )


def _training(device: torch.device, *, quick: bool) -> dict[str, float]:
    """Seconds an epoch, by kind of memory; only the loader's `pin_memory` differs."""
    images = TensorDataset(torch.randn(128 if quick else 1024, 3, 224, 224))
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 64, 7, stride=2), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)).to(
        device
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def epoch(*, pinned: bool) -> None:
        for (batch,) in DataLoader(images, batch_size=64, pin_memory=pinned):
            outputs = model(batch.to(device, non_blocking=pinned))
            functional.mse_loss(outputs, torch.zeros_like(outputs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    ways = {"pageable": lambda: epoch(pinned=False), "pinned": lambda: epoch(pinned=True)}
    steps = len(images) // 64
    return {name: took / steps for name, took in medians(in_turn(ways, device, rounds=2 if quick else 5)).items()}


def _without_gpu(device: torch.device, pageable: torch.Tensor, mib: int, *, rounds: int) -> Report:
    buffer = torch.empty_like(pageable)
    took = medians(in_turn({"host": lambda: buffer.copy_(pageable)}, device, rounds=rounds))["host"]
    speed = mib / 1024 / took
    return Report(
        name="pinning",
        device=device.type,
        machine=described(device),
        setup=f"a copy of {mib} MiB within this host's memory",
        figures={
            "copy": Figure(
                None,
                f"no GPU here; the extra copy that pageable memory needs runs at {speed:.1f} GiB/s on this host",
                f"{_CONDITION} The extra copy matters when it is not much faster than the bus (about 25 GiB/s for PCIe 4.0 x16, "
                "50 for 5.0). Without a GPU torch ignores pin_memory=True and says so.",
            ),
            "training": Figure(None, "no GPU here", _CONDITION),
        },
        head=["copy", "GiB/s"],
        rows=[["within the host", f"{speed:.1f}"]],
    )
