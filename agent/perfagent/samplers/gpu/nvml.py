"""The one door to NVML. Everything behind it is plain code with None for what a device does not report.

A call that the driver refuses for good is asked once per device and never again; one that fails for the moment gives None; a
device that is gone raises DeviceLost, and only that. A call that hangs hangs the courier's thread, which is given two seconds
and then replaced (delivery/courier.py).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from perfagent.samplers.gpu.board import DeviceLost

__all__ = ["NO_DRIVER", "Door", "Library", "load"]

NO_DRIVER = "no_driver"

_FOR_GOOD = frozenset((1, 2, 3, 4, 13, 25, 26))
"""NVML shut down by the script, invalid argument, not supported, no permission, function not found, argument version
mismatch, deprecated."""
_NOT_FOUND = 6
_GONE = frozenset((9, 15, 16, 18, 28))
"""Driver not loaded, GPU is lost, reset required, library and driver differ, GPU not found."""
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")

Library = Any
"""The module `pynvml`, or what stands for it in a test."""


class Door:
    """The guarded calls about one device. Not thread-safe: one thread samples."""

    __slots__ = ("_error", "_refused", "nvml")

    def __init__(self, library: Library) -> None:
        self.nvml = library
        self._error: type[Exception] = library.NVMLError
        self._refused: set[str] = set()

    def ask(self, name: str, *arguments: object, what: str = "", nothing: object = None) -> Any:
        """The answer of a function of the library; None when the device does not report it. Raises DeviceLost.

        what: names the question where one function answers several. nothing: the answer where there is nothing to
        report.
        """
        if (key := what or name) in self._refused:
            return None
        function: Callable[..., Any] | None = getattr(self.nvml, name, None)
        if function is None:  # an older pynvml
            self._refused.add(key)
            return None
        try:
            return function(*arguments)
        except self._error as error:
            code = getattr(error, "value", 0)
            if code in _GONE:
                raise DeviceLost(str(error)) from None
            if code == _NOT_FOUND:
                return nothing
            if code in _FOR_GOOD:
                self._refused.add(key)
        # a library that is older, newer or broken
        except (AttributeError, ctypes.ArgumentError, OSError, UnicodeDecodeError):
            self._refused.add(key)
        return None

    def refuses(self, name: str) -> bool:
        """Whether that question was answered with "never"."""
        return name in self._refused


def load(driver_files: Sequence[str] | None = None) -> tuple[Library | None, str]:
    """The library, started; or None and why there is none: a key, or NVML's own words. Blocks for as long as the driver likes.
    driver_files: any of these shows that there is a driver.

    Where no file of the driver is to be seen, not even the module is imported (30 ms and 6 MB).
    """
    if sys.platform == "darwin":
        return None, "apple"
    if not any(Path(name).exists() for name in (_DRIVER_FILES if driver_files is None else driver_files)):
        return None, NO_DRIVER
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        return None, "no_package"
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError, OSError, AttributeError) as error:
        return None, str(error)
    return pynvml, ""
