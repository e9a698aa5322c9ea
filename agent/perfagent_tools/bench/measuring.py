"""Clocks and memory: ways to do the same work, measured in turn, and the peak of what one call allocates.

Ways are taken in turn, in another order in each round, so that a machine that others use makes all of them slower
alike; the first round warms up and is left out. On a GPU each clock is read when the device has done its work.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["bytes_of", "in_turn", "medians", "peak_bytes", "seconds", "seeded", "wait"]

LONGEST_S, LEAST_ROUNDS = 60.0, 3


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - began


def in_turn(ways: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int) -> dict[str, list[float]]:
    """Seconds a call, by way: `rounds` figures each, or fewer (3 at least) where they take longer than LONGEST_S
    together."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    order, shuffle = list(ways), random.Random(0)  # noqa: S311 - an order, not a secret
    began = time.monotonic()
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() - began > LONGEST_S:
            break
        shuffle.shuffle(order)
        for name in order:
            took = seconds(ways[name], device)
            if number:
                found[name].append(took)
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in found.items()}


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most memory that the call holds at a time, beyond what was held before it: by torch's allocator on a GPU, by
    torch.profiler's allocations and releases on a CPU. What the call leaves behind counts as well."""
    if device.type == "cuda":
        wait(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        call()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = [event for event in (results.events() if results is not None else ()) if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def bytes_of(*owners: torch.nn.Module | torch.optim.Optimizer) -> int:
    """What models (parameters, their gradients, buffers) and optimizers (their state) hold."""
    tensors: list[torch.Tensor] = []
    for owner in owners:
        if isinstance(owner, torch.nn.Module):
            tensors += [*owner.parameters(), *owner.buffers()]
            tensors += [parameter.grad for parameter in owner.parameters() if parameter.grad is not None]
        else:
            tensors += [
                value for state in owner.state.values() for value in state.values() if isinstance(value, torch.Tensor)
            ]
    return sum(tensor.nbytes for tensor in tensors)


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """The same random numbers every time; those of the caller go on where they were."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
