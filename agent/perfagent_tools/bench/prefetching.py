"""Prefetching: batches that are copied to the GPU, or loaded by a worker, while the step before them computes.

Without a GPU there is nothing to copy. What is measured then is the other half of the same idea: one loader worker that
reads ahead, with loading that takes a known share of the step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from perfagent_loop.data.prefetch import Prefetcher
from perfagent_tools.bench.machine import described
from perfagent_tools.bench.measuring import in_turn, medians
from perfagent_tools.bench.report import Figure, Report, percent

__all__ = ["Loading", "measure"]

STEP_S = 0.040
SHARES = (0.1, 0.25, 0.5)
_CONDITION = (
    "The gain is the share of the step that loading and copying take, and no more. It helps while batches come from pinned "
    "memory (other memory is not copied during computing), a second batch fits on the device, and loading is faster than "
    "computing."
)


class Loading(Dataset[Tensor]):
    """Batches of 16 numbers, each after `wait_s` of reading."""

    def __init__(self, batches: int, wait_s: float) -> None:
        self.batches, self.wait_s = batches, wait_s

    def __len__(self) -> int:
        return self.batches

    def __getitem__(self, index: int) -> Tensor:
        if index >= self.batches:
            raise IndexError(index)
        time.sleep(self.wait_s)
        return torch.full((16,), float(index))


def measure(device: torch.device, *, quick: bool = False) -> Report:
    return _on_gpu(device, quick=quick) if device.type == "cuda" else _on_cpu(device, quick=quick)


def _on_gpu(device: torch.device, *, quick: bool) -> Report:
    """A convolution whose batches take about as long to copy as its step to compute."""
    batches = 8 if quick else 64
    images = torch.randn(batches, 32, 3, 224, 224).unbind()
    loader: DataLoader[Tensor] = DataLoader(images, batch_size=None, pin_memory=True)  # type: ignore[arg-type]
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 7, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(64, 128, 3, stride=2),
        torch.nn.AdaptiveAvgPool2d(1),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def epoch(source: Iterable[Tensor]) -> None:
        for batch in source:
            outputs = model(batch.to(device))
            functional.mse_loss(outputs, torch.zeros_like(outputs)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()

    already = [batch.to(device) for batch in images[:8]]
    ways: dict[str, Callable[[], None]] = {
        "copied in the step": lambda: epoch(loader),
        "copied ahead": lambda: epoch(Prefetcher(loader, device)),
        "nothing to copy": lambda: epoch(already[number % len(already)] for number in range(batches)),
    }
    took = {name: value / batches for name, value in medians(in_turn(ways, device, rounds=2 if quick else 7)).items()}
    gain = 100 * (took["copied in the step"] / took["copied ahead"] - 1)
    return Report(
        name="prefetch",
        device=device.type,
        machine=described(device),
        setup="batches of 32 images of 224 x 224 from pinned memory, a small convolution, fp32",
        figures={"speed": Figure(gain, f"copied ahead, training is {percent(gain)} faster", _CONDITION)},
        head=["batches", "ms a step"],
        rows=[[name, f"{1000 * value:.2f}"] for name, value in took.items()],
    )


def _on_cpu(device: torch.device, *, quick: bool) -> Report:
    step_s, batches = (0.004 if quick else STEP_S), (8 if quick else 48)

    def epoch(source: Iterable[Tensor]) -> None:
        for _ in source:
            time.sleep(step_s)  # the device computes, the host has nothing to do

    rows = []
    for share in SHARES:
        data = Loading(batches, step_s * share / (1 - share))
        ways = {
            "in the step": lambda data=data: epoch(DataLoader(data, batch_size=None)),
            "read ahead": lambda data=data: epoch(DataLoader(data, batch_size=None, num_workers=1)),
        }
        took = {
            name: value / batches for name, value in medians(in_turn(ways, device, rounds=1 if quick else 3)).items()
        }
        gain = 100 * (took["in the step"] / took["read ahead"] - 1)
        rows.append([percent(100 * share), *(f"{1000 * took[name]:.1f}" for name in ways), f"{gain:.0f}"])
    ready = [torch.zeros(16)] * 10_000
    bare = medians(
        in_turn(
            {"bare": lambda: _through(ready), "prefetched": lambda: _through(Prefetcher(ready, device))},
            device,
            rounds=5,
        )
    )
    cost = 1e6 * (bare["prefetched"] - bare["bare"]) / len(ready)
    return Report(
        name="prefetch",
        device=device.type,
        machine=described(device),
        setup=f"{batches} batches, a device that computes for {1000 * step_s:.0f} ms a step, one worker that reads ahead",
        figures={
            "speed": Figure(
                None,
                f"no GPU here; reading ahead where loading takes {SHARES[0]:.0%} of the step gains {rows[0][-1]} %, where it "
                "takes "
                f"{SHARES[1]:.0%} {rows[1][-1]} %",
                _CONDITION,
            )
        },
        head=["loading, of the step", "in the step ms", "read ahead ms", "gain %"],
        rows=rows,
        notes=(f"Prefetcher hands batches out untouched on a CPU, at {cost:.2f} µs each.",),
    )


def _through(source: Iterable[Tensor]) -> None:
    for _ in source:
        pass
