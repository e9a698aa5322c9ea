"""Saves and restores the state of every random generator of this process.

Each rank has its own. What a DataLoader's worker draws is not in here: workers are seeded anew from torch's generator.
"""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

__all__ = ["cuda_in_use", "is_same", "random_state", "restore_random_state"]


def cuda_in_use() -> bool:
    """Whether this process has begun to use a CUDA device."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def random_state() -> dict[str, Any]:
    """Python's, numpy's (where it is imported), torch's and each CUDA device's generator, as tensors, numbers, lists
    and text, which weights_only=True loads again."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": [version, list(words), gauss]}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, place, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [str(kind), [int(key) for key in keys], int(place), int(has_gauss), float(cached)]
    if cuda_in_use():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether nothing was drawn on the host between two states."""
    return torch.equal(one["torch"], other["torch"]) and all(
        one.get(name) == other.get(name) for name in ("python", "numpy")
    )


def restore_random_state(state: dict[str, Any]) -> None:
    """Puts back what `random_state` took. A machine with fewer GPUs takes those that it has."""
    torch.set_rng_state(state["torch"].cpu())
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, place, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, cached))
    if "cuda" in state and torch.cuda.is_available():
        for device, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(of_device.cpu(), device)
