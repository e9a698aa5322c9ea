"""The AMD and Intel GPUs of this node, by /sys/class/drm. Display adapters (ast, mgag200, virtio) are none."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perfagent.samplers.gpu.amd import AmdGpu
from perfagent.samplers.gpu.intel import IntelGpu
from perfagent.samplers.gpu.kernel_gpu import KernelGpu

__all__ = ["boards", "driver_of"]

_KINDS: dict[str, type[KernelGpu]] = {"amdgpu": AmdGpu, "i915": IntelGpu, "xe": IntelGpu}


def boards(sys: Path = Path("/sys"), **options: Any) -> list[KernelGpu]:
    """In the order of their PCI addresses. sys, and options of `KernelGpu`: a test passes its own."""
    found: dict[str, tuple[type[KernelGpu], Path, str]] = {}
    for card in sorted((sys / "class/drm").glob("card*")):
        try:
            folder = (card / "device").resolve(strict=True)
            lines = (folder / "uevent").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:  # it is being removed
            continue
        kind = next((_KINDS.get(line.removeprefix("DRIVER=")) for line in lines if line.startswith("DRIVER=")), None)
        if kind is not None and card.name.removeprefix("card").isdigit():  # else a connector of a card
            found[folder.name] = kind, folder, card.name
    ordered = [found[pci] for pci in sorted(found)]
    return [kind(index, folder, card, **options) for index, (kind, folder, card) in enumerate(ordered)]


def driver_of(gpus: Sequence[KernelGpu]) -> str:
    return f"{', '.join(sorted({gpu.driver for gpu in gpus}))} of Linux {os.uname().release}"
