"""What `torch.fakegpu` is: the part of torch.cuda's interface that scripts, torch itself and perfagent use."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import OutOfMemoryError
from torch.accelerator import current_device_index as current_device
from torch.accelerator import (
    current_stream,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    set_stream,
    synchronize,
)
from torch.accelerator import get_memory_info as mem_get_info
from torch.accelerator import set_device_index as set_device

from fake_accelerator.building import NAME

__all__ = [
    "Event", "OutOfMemoryError", "Stream", "current_device", "current_stream", "device", "device_count",
    "empty_cache", "get_amp_supported_dtype", "get_device_capability", "get_device_name", "get_device_properties",
    "get_rng_state", "get_rng_state_all", "init", "is_available", "is_bf16_supported", "is_current_stream_capturing",
    "is_initialized", "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "memory_stats", "memory_stats_as_nested_dict", "reset_accumulated_memory_stats",
    "reset_peak_memory_stats", "set_device", "set_rng_state", "set_rng_state_all", "set_stream", "stream", "synchronize",
]  # fmt: skip


class Stream(torch.Stream):
    """torch.cuda.Stream's arguments."""

    def __new__(cls, device: torch.device | str | int | None = None, priority: int = 0) -> Stream:
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:  # noqa: N802
    """torch.cuda.Event's arguments. No class: torch.Event.elapsed_time() refuses events of a class of its own."""
    return torch.Event(NAME, enable_timing=enable_timing, blocking=blocking, interprocess=interprocess)


@contextlib.contextmanager
def stream(entered: torch.Stream | None) -> Iterator[None]:
    with contextlib.nullcontext() if entered is None else entered:
        yield


class device(torch.accelerator.device_index):  # noqa: N801 - as torch.cuda has it
    """Makes a device, of any spelling, the current one."""

    def __init__(self, given: torch.device | str | int | None) -> None:
        super().__init__(_index(given))


def _index(given: torch.device | str | int | None) -> int:
    index = given if isinstance(given, int) else torch.device(given).index if given is not None else None
    return current_device() if index is None else index


def init() -> None:
    """As torch.cuda has it; there is nothing to do."""


def is_initialized() -> bool:
    return True


def is_available() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(torch._C._accelerator_hooks_device_count())


def is_current_stream_capturing() -> bool:
    return current_stream().is_capturing()


def memory_stats_as_nested_dict(device: torch.device | str | int | None = None) -> dict[str, Any]:
    return torch._C._accelerator_getDeviceStats(_index(device))


def get_device_name(device: torch.device | str | int | None = None) -> str:
    return str(get_device_properties(device).name)


def get_device_properties(device: torch.device | str | int | None = None) -> SimpleNamespace:
    return SimpleNamespace(name="Fake GPU", total_memory=mem_get_info(_index(device))[1], major=1, minor=0)


def get_device_capability(device: torch.device | str | int | None = None) -> tuple[int, int]:
    return (1, 0)


def is_bf16_supported() -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# ---- random numbers: the CPU's generator, which torch seeds and saves beside these


def manual_seed(seed: int) -> None:
    """The CPU's generator has the seed already."""


manual_seed_all = manual_seed


def get_rng_state(device: torch.device | str | int | None = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
    torch.set_rng_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(number) for number in range(device_count())]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    set_rng_state(states[0])
