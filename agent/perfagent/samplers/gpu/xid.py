"""Xid errors: what the NVIDIA driver reports when something goes wrong with a GPU, by NVML's set of events."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from perfagent.samplers.gpu.board import DeviceLost
from perfagent.samplers.gpu.device import Gpu
from perfagent.samplers.gpu.nvml import Door, Library

__all__ = ["XidEvents"]

_XID_EVENT = 0x8
_MOST_A_POLL = 16


class XidEvents:
    """Errors of the watched devices, since they were watched."""

    def __init__(self, library: Library) -> None:
        self._door = Door(library)
        self._begin()

    def _begin(self) -> None:
        self._set: object = None
        self._watched: list[Gpu] = []
        self._registered = False
        with contextlib.suppress(DeviceLost):
            self._set = self._door.ask("nvmlEventSetCreate")

    def watch(self, gpus: Sequence[Gpu]) -> None:
        for gpu in gpus:
            if self._set is None or any(gpu.board == other.board for other in self._watched):
                continue
            self._watched.append(gpu)
            with contextlib.suppress(DeviceLost):
                supported = self._door.ask("nvmlDeviceGetSupportedEventTypes", gpu.handle, what=f"types {gpu.uuid}")
                if supported is not None and supported & _XID_EVENT:
                    what = f"register {gpu.uuid}"
                    self._door.ask("nvmlDeviceRegisterEvents", gpu.handle, _XID_EVENT, self._set, what=what)
                    self._registered = self._registered or not self._door.refuses(what)

    def poll(self) -> list[tuple[Gpu | None, int]]:
        """Device, None for one that is not watched, and code of each error since the last call. Never waits."""
        found: list[tuple[Gpu | None, int]] = []
        while self._registered and len(found) < _MOST_A_POLL:
            try:
                data = self._door.ask("nvmlEventSetWait_v2", self._set, 0)
            except DeviceLost:  # of any device in the set, from now on at every call: the others get a set of their own
                self._begin()
                break
            if data is None:  # a timeout: nothing waits there
                break
            if data.eventType & _XID_EVENT:
                found.append((self._of(data.device), int(data.eventData)))
        return found

    def _of(self, handle: Any) -> Gpu | None:
        """By its handle, which NVML gives each device once: one that fell off the bus no longer gives its UUID."""
        return next((gpu for gpu in self._watched if _address(gpu.handle) == _address(handle)), None)


def _address(handle: Any) -> int:
    """Where a handle points to: every call gives another Python object for the same device."""
    return ctypes.addressof(handle.contents) if handle and hasattr(handle, "contents") else id(handle)
