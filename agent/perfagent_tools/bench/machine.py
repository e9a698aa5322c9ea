"""The machine and the device of a benchmark, in words."""

from __future__ import annotations

import os

import torch

from perfagent.command_line.processor import cpuinfo, processor
from perfagent.errors import ConfigError, ResourceError

__all__ = ["described", "device_of", "has_bf16"]


def device_of(given: str | None) -> torch.device:
    """The device of that name; without one a GPU where there is one. Raises ConfigError for one that is not there."""
    if given in (None, "cuda"):
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        if given == "cuda":
            raise ResourceError("--device is cuda, and torch sees no GPU here; use --device cpu, or a torch with CUDA")
    elif given != "cpu":
        raise ConfigError(f"--device is {given!r}; allowed are cpu and cuda")
    return torch.device("cpu")


def described(device: torch.device) -> str:
    """Processor, cores, GPU, versions; not the machine's name."""
    parts = [torch.cuda.get_device_name(device)] if device.type == "cuda" else []
    return ", ".join(
        [
            *parts,
            processor(),
            f"{os.cpu_count()} cores",
            f"{torch.get_num_threads()} torch threads",
            f"torch {torch.__version__}",
        ]
    )


def has_bf16(device: torch.device) -> str | None:
    """What multiplies bf16 in hardware here, by name; None where it is emulated."""
    if device.type == "cuda":
        return "tensor cores" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    flags = set(cpuinfo("flags").split())
    return next((name for name in ("amx_bf16", "avx512_bf16") if name in flags), None)
