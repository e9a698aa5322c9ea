"""One library in one fresh process: blocks of steps by hand and through it, in turn; prints one line `RESULT {json}`.

Both train the same small model on the same batches with the same operations: what differs is who calls them. The clock
is the CPU of the training thread, which holds on a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How the model is trained."""

    half: bool = False
    accumulated: int = 1
    clip: float | None = None


CASES = {
    "fp32": Case(),
    "bf16": Case(half=True),
    "fp32, clipped": Case(clip=1.0),
    "bf16, clipped, 4 micro-steps": Case(half=True, accumulated=4, clip=1.0),
}


def parts() -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    data = TensorDataset(torch.randn(BATCHES * 4, 16), torch.randn(BATCHES * 4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), DataLoader(data, batch_size=4)


def by_hand(case: Case) -> Callable[[], None]:
    model, optimizer, loader = parts()

    def epoch() -> None:
        for number, (x, y) in enumerate(loader, start=1):
            with torch.autocast("cpu", torch.bfloat16) if case.half else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), y)
            (loss if case.accumulated == 1 else loss / case.accumulated).backward()
            if number % case.accumulated == 0:
                if case.clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def through_perfagent(case: Case) -> Callable[[], None]:
    import perfagent

    model, optimizer, loader = parts()
    loop = perfagent.loop(
        model, optimizer, precision="bf16" if case.half else "fp32", grad_accum=case.accumulated, clip_norm=case.clip
    )

    def epoch() -> None:
        for x, y in loop.batches(loader):
            with loop.forward():
                loss = nn.functional.mse_loss(model(x), y)
            loop.backward(loss)
            loop.step()

    return epoch


def through_fabric(case: Case) -> Callable[[], None]:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1, precision="bf16-mixed" if case.half else "32-true")
    plain, plain_optimizer, plain_loader = parts()
    model, optimizer = fabric.setup(plain, plain_optimizer)
    loader = fabric.setup_dataloaders(plain_loader)

    def epoch() -> None:
        for number, (x, y) in enumerate(loader, start=1):
            ends = number % case.accumulated == 0
            with fabric.no_backward_sync(model, enabled=not ends) if case.accumulated > 1 else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), y)
                fabric.backward(loss if case.accumulated == 1 else loss / case.accumulated)
            if ends:
                if case.clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=case.clip, error_if_nonfinite=False)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


def through_accelerate(case: Case) -> Callable[[], None]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)  # it is one a process, and the case before had its own
    GradientState._reset_state()
    accelerator = Accelerator(
        cpu=True, mixed_precision="bf16" if case.half else "no", gradient_accumulation_steps=case.accumulated
    )
    model, optimizer, loader = accelerator.prepare(*parts())

    def epoch() -> None:
        for x, y in loader:
            with accelerator.accumulate(model) if case.accumulated > 1 else contextlib.nullcontext():
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if case.clip is not None and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), case.clip)
                optimizer.step()
                optimizer.zero_grad()

    return epoch


LIBRARIES: dict[str, Callable[[Case], Callable[[], None]]] = {
    "perfagent.loop": through_perfagent,
    "Fabric": through_fabric,
    "Accelerate": through_accelerate,
}


def micro_step_us(epoch: Callable[[], None]) -> float:
    begin = time.thread_time()
    epoch()
    return (time.thread_time() - begin) / BATCHES * 1e6


def blocks(first: Callable[[], None], second: Callable[[], None], rounds: int) -> Iterator[tuple[float, float]]:
    """CPU µs of a micro-step of each, one after the other, changing places."""
    for _ in range(5):
        first()
        second()
    gc.collect()
    gc.freeze()  # what the imports left behind is no part of a step
    for number in range(rounds):
        if number % 2:
            one = micro_step_us(first)
            yield one, micro_step_us(second)
        else:
            other = micro_step_us(second)
            yield micro_step_us(first), other


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--through", required=True, choices=LIBRARIES)
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, float] = {}
    for name, case in CASES.items():
        seen = [*blocks(by_hand(case), LIBRARIES[options.through](case), options.rounds)]
        result[f"{name}: by hand"] = statistics.median(hand for hand, _ in seen)
        # neighbors share what the machine is doing
        result[name] = statistics.median(through - hand for hand, through in seen)
    print("RESULT " + json.dumps(result), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
