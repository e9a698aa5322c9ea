"""Xid errors: what the NVIDIA driver reports when something goes wrong with a GPU.

NVML's event set is polled with no time to wait. Where events cannot be registered (some containers, vGPU), and once a
lost GPU has ended them for all, the kernel's log is read instead, if it may be. Codes and their meaning: NVIDIA's
catalogue of Xid errors (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from collections.abc import Sequence
from typing import Any

from perfagent.process.descriptors import Descriptor, opened
from perfagent.samplers.gpu.board import DeviceLost, place
from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.nvml import Door, Library

__all__ = ["MEANINGS", "KernelLog", "Xid", "XidEvents"]

MEANINGS = {
    13: "graphics engine exception", 31: "memory page fault", 32: "invalid or corrupted push buffer",
    43: "GPU stopped processing", 45: "preemptive cleanup after an earlier error", 48: "double-bit ECC error",
    61: "internal micro-controller breakpoint", 62: "internal micro-controller halt",
    63: "row remapping or page retirement", 64: "row remapping or page retirement failed",
    68: "video processor exception", 69: "graphics engine class error", 74: "NVLink error",
    79: "GPU has fallen off the bus", 92: "high rate of single-bit ECC errors", 94: "contained ECC error",
    95: "uncontained ECC error", 109: "context switch timeout", 119: "GSP does not answer", 120: "GSP error",
    121: "chip-to-chip link error", 140: "unrecovered ECC error", 149: "NVLink error",
}  # fmt: skip
_XID_EVENT = 0x8
_MOST_A_POLL = 16
_LINE = rb"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)"


Xid = tuple[Gpu | None, int]
"""An error: the device, None when the driver names one that is not watched; and its code."""


class XidEvents:
    """Errors of the watched devices, since they were watched."""

    def __init__(self, library: Library, log: KernelLog | None = None) -> None:
        self._door = Door(library)
        self._set: object = None
        with contextlib.suppress(DeviceLost):
            self._set = self._door.ask("nvmlEventSetCreate")
        self._watched: list[Gpu] = []
        self._registered = False
        self._log = log if log is not None else KernelLog()

    def watch(self, gpus: Sequence[Gpu]) -> None:
        for gpu in gpus:
            if any(gpu.board == other.board for other in self._watched):
                continue
            self._watched.append(gpu)
            if self._set is None:
                continue
            with contextlib.suppress(DeviceLost):
                supported = self._door.ask("nvmlDeviceGetSupportedEventTypes", gpu.handle, what=f"types {gpu.uuid}")
                if supported is not None and supported & _XID_EVENT:
                    what = f"register {gpu.uuid}"
                    self._door.ask("nvmlDeviceRegisterEvents", gpu.handle, _XID_EVENT, self._set, what=what)
                    self._registered = self._registered or not self._door.refuses(what)

    def poll(self) -> list[Xid]:
        """What happened since the last call. Never waits."""
        # keeps the position in the log current, so that a later fallback starts here
        logged = self._log.poll()
        if not self._registered:
            return [(self._by_pci(pci), code) for pci, code in logged]
        found: list[Xid] = []
        while len(found) < _MOST_A_POLL:
            try:
                data = self._door.ask("nvmlEventSetWait_v2", self._set, 0)
            except DeviceLost:  # of any device in the set, and from now on at every call
                self._registered = False
                known = {code for _, code in found}
                return found + [(self._by_pci(pci), code) for pci, code in logged if code not in known]
            if data is None:  # a timeout: nothing waits there
                break
            if data.eventType & _XID_EVENT:
                found.append((self._of(data.device), int(data.eventData)))
        return found

    def _of(self, handle: Any) -> Gpu | None:
        """By its handle, which NVML gives each device once: one that fell off the bus no longer gives its UUID."""
        return next((gpu for gpu in self._watched if _address(gpu.handle) == _address(handle)), None)

    def _by_pci(self, pci: str) -> Gpu | None:
        return next((gpu for gpu in self._watched if pci and place(pci) == place(gpu.pci)), None)


def _address(handle: Any) -> int:
    """Where a handle points to: every call gives another Python object for the same device."""
    return ctypes.addressof(handle.contents) if handle and hasattr(handle, "contents") else id(handle)


class KernelLog:
    """The kernel's messages from now on; nothing where they may not be read. path: /dev/kmsg, a record a read."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._path, self._tried = path, False
        self._file: Descriptor | None = None

    def __del__(self) -> None:
        if self._file is not None:  # a search of many runs in one process would come to its limit of open files
            # at the very end of the process modules are empty
            with contextlib.suppress(OSError, AttributeError, TypeError):
                self._file.close()

    def poll(self) -> list[tuple[str, int]]:
        """(PCI address, code) of each Xid since the last call."""
        if not self._tried:
            self._tried = True
            with contextlib.suppress(OSError):
                self._file = opened(self._path, os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self._file.fd, 0, os.SEEK_END)
        file = self._file
        if file is None or not file.is_ours:
            return []
        found: list[tuple[str, int]] = []
        for _ in range(1000):
            try:
                record = os.read(file.fd, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:  # records were overwritten before we came: the next read goes on behind them
                continue
            except OSError:
                self._file = None
                file.close()
                break
            if not record:
                break
            found.extend((match[1].decode("ascii"), int(match[2])) for match in re.finditer(_LINE, record))
        return found
