"""What NVML and the kernel's files have in common: how a board is lost, and how its PCI address is compared."""

from __future__ import annotations

__all__ = ["DeviceLost", "place"]


class DeviceLost(Exception):  # noqa: N818 - what happened, as the driver says it
    """The device fell off the bus, needs a reset, or its driver is gone. The message is the driver's."""


def place(pci: str) -> str:
    """Domain, bus and device of a PCI address: the kernel writes 0000:3b:00.0, NVML 00000000:3B:00.0."""
    return pci.lower().partition(".")[0].lstrip("0")
