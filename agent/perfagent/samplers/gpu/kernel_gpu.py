"""A GPU by the files of its kernel driver in /sys: what AMD's and Intel's have in common. No library, no root."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from perfagent.samplers.gpu.board import DeviceLost
from perfagent.samplers.gpu.drm_clients import DrmClients

__all__ = ["Files", "KernelGpu", "Row"]

_PROCESS = Path("/proc/self")
_SLOW_S, _PAUSE = 0.1, 100
"""A file that took 0.2 s is read again after 20 s: some ask the device's controller, which may be busy."""
_TEMPERATURES = {
    "edge": "temperature_c", "junction": "temperature_c", "pkg": "temperature_c",
    "mem": "memory_temperature_c", "vram": "memory_temperature_c",
}  # fmt: skip
"""By the sensors' labels in amdgpu and xe; the first that exists gives the value."""
_MAY_BE_ZERO = frozenset(("utilization_pct", "memory_busy_pct", "memory_used_bytes", "fan_pct", "pcie_replays"))
"""A clock, a temperature or a power of 0 is what drivers give where they measure nothing."""

Clock = Callable[[], float]
Row = tuple[str, str, float]
"""Name of the value, name of the file, and the factor to our unit. Of several rows of one name the first that can be
read gives the value."""


class Files:
    """The small files below a folder of /sys, by relative name. Each reading opens its file anew: a descriptor would
    outlive a device that is gone. asleep: nothing is read; most files would wake the device."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.folder, self._clock, self.asleep = folder, clock, False
        self._not_before: dict[str, float] = {}

    def read(self, name: str) -> bytes | None:
        """The whole file. None while it cannot be read (EIO, EBUSY, EPERM during a reset), and for good where it does
        not exist."""
        begin = self._clock()
        if self.asleep or begin < self._not_before.get(name, 0.0):
            return None
        content: bytes | None = None
        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                content = b"".join(iter(lambda: file.read(4096), b""))  # a list comes in pieces of a page
        except FileNotFoundError:
            self._not_before[name] = math.inf
        except OSError:
            content = None
        took = self._clock() - begin
        if took > _SLOW_S:
            self._not_before[name] = begin + _PAUSE * took
        return content

    def text(self, name: str) -> str:
        return (self.read(name) or b"").decode("utf-8", "replace").strip()

    def number(self, name: str) -> float | None:
        text = self.text(name)
        return float(text) if text.isdecimal() else None

    def names(self, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob(pattern))


class KernelGpu:
    """The counterpart of device.Gpu: its methods say and raise the same.

    index: on this node, by PCI address; folder: of its PCI device; card: its name in /sys/class/drm; process: our folder
    in /proc. is_divided: several ranks may compute on it, and its figures are no single rank's. is_integrated: part of
    the processor, and of interest only where a rank computes on it.
    """

    vendor = ""
    is_divided = is_integrated = False

    def __init__(
        self, index: int, folder: Path, card: str, *, process: Path = _PROCESS, clock: Clock = time.monotonic
    ) -> None:
        self.index, self.pci, self._card, self._clock = index, folder.name.lower(), f"drm/{card}/", clock
        self.files = files = Files(folder, clock)
        told = dict(line.partition("=")[::2] for line in files.text("uevent").splitlines())
        self.driver = told.get("DRIVER", "")
        self.uuid = self.board = files.text("unique_id").lower() or self.pci
        self.name = files.text("product_name") or f"{self.vendor} GPU {told.get('PCI_ID', '')}".strip()
        self.processes = DrmClients(self.pci, process, is_utilization=self.vendor == "Intel")
        self.free_bytes: float | None = None
        self._energy_j: float | None = None
        names = files.names("hwmon/hwmon*/name")
        self._hwmon = next((name.removesuffix("name") for name in names if files.text(name) == self.driver), "none/")
        labels = files.names(self._hwmon + "temp*_label")
        inputs = {files.text(name): name.replace("_label", "_input") for name in labels}
        sensors = {name: inputs[label] for label, name in reversed(_TEMPERATURES.items()) if label in inputs}
        # without labels (i915, amdgpu before Linux 5.3) there is one sensor, of the whole chip
        sensors = sensors or {"temperature_c": f"{self._hwmon}temp1_input"}
        self._temperatures: list[Row] = [(name, file, 1e-3) for name, file in sensors.items()]
        self._often: list[Row] = []
        self._rarely: list[Row] = []

    def readings(self) -> dict[str, float]:
        self.files.asleep = False
        self.files.asleep = self.files.text("power/runtime_status") == "suspended"
        values = self._read()
        if not values and not self.files.folder.exists():
            raise DeviceLost("its files in /sys are gone")
        used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
        self.free_bytes = None if used is None or total is None else total - used
        return values

    def second(self, _now: float) -> dict[str, float]:
        return self._numbers(self._temperatures)

    def rare(self) -> dict[str, float]:
        return self._numbers(self._rarely)

    def energy_j(self) -> float | None:
        """As of the last reading, since some moment; None where the driver does not count it."""
        return self._energy_j

    def describe(self) -> dict[str, Any]:
        values = self.readings() | self.rare()
        told: dict[str, Any] = {"index": self.index, "uuid": self.uuid, "name": self.name, "pci": self.pci}
        return told | {name: values[name] for name in ("memory_total_bytes", "power_limit_w") if name in values}

    def _read(self) -> dict[str, float]:
        return self._numbers(self._often)

    def _numbers(self, rows: Iterable[Row]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, file, factor in rows:
            number = None if name in values else self.files.number(file)
            if number or (number is not None and name in _MAY_BE_ZERO):
                values[name] = number * factor
        return values
