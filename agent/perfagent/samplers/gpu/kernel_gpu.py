"""AMD's and Intel's GPUs by the files of their kernel drivers in /sys. No library, no root.

Meaning and units, in the kernel's sources. amdgpu: Documentation/gpu/amdgpu (thermal, driver-misc, RAS), that is the
comments in drivers/gpu/drm/amd/pm/amdgpu_pm.c and amdgpu_ras.c. i915 and xe: Documentation/ABI/testing/
sysfs-driver-intel-i915-hwmon and -xe-hwmon, and the comments in drivers/gpu/drm/xe/xe_gt_freq.c.
Left out: AMD's binary table `gpu_metrics`, which differs from chip to chip, `pcie_bw`, which takes a second, and the PCIe
link, of which the function shows the switch or bridge inside the board.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from perfagent.samplers.gpu.board import DeviceLost
from perfagent.samplers.gpu.drm_clients import DrmClients
from perfagent.samplers.rates import Rates

__all__ = ["Files", "KernelGpu", "boards", "driver_of"]

_PROCESS = Path("/proc/self")
_TEMPERATURES = {
    "edge": "temperature_c", "junction": "temperature_c", "pkg": "temperature_c",
    "mem": "memory_temperature_c", "vram": "memory_temperature_c",
}  # fmt: skip
"""By the sensors' labels in amdgpu and xe; the first that exists gives the value."""
_MAY_BE_ZERO = frozenset(("utilization_pct", "memory_busy_pct", "memory_used_bytes", "fan_pct", "pcie_replays"))
"""A clock, a temperature or a power of 0 is what drivers give where they measure nothing."""
_VENDORS = {"amdgpu": "AMD", "i915": "Intel", "xe": "Intel"}

Row = tuple[str, str, float]
"""Name of the value, name of the file, and the factor to our unit. Of several rows of one name the first that can be
read gives the value."""
_OFTEN: tuple[Row, ...] = (
    ("utilization_pct", "gpu_busy_percent", 1.0),
    ("memory_busy_pct", "mem_busy_percent", 1.0),
    ("memory_used_bytes", "mem_info_vram_used", 1.0),
    ("memory_total_bytes", "mem_info_vram_total", 1.0),
    ("power_w", "{hwmon}power1_average", 1e-6),
    ("power_w", "{hwmon}power1_input", 1e-6),
    ("sm_clock_mhz", "{hwmon}freq1_input", 1e-6),
    ("sm_clock_mhz", "tile0/gt0/freq0/act_freq", 1.0),
    ("sm_clock_mhz", "{card}gt/gt0/rps_act_freq_mhz", 1.0),
    ("sm_clock_mhz", "{card}gt_act_freq_mhz", 1.0),
)
_RARELY: tuple[Row, ...] = (
    ("power_limit_w", "{hwmon}power1_max", 1e-6),  # of Intel's card or, where it has none, its package
    ("power_limit_w", "{hwmon}power2_max", 1e-6),
    ("power_limit_w", "{hwmon}power1_cap", 1e-6),
    ("memory_clock_mhz", "{hwmon}freq2_input", 1e-6),
    ("fan_pct", "{hwmon}pwm1", 100 / 255),
    ("pcie_replays", "pcie_replay_count", 1.0),
)


class Files:
    """The small files below a folder of /sys, by relative name. Each reading opens its file anew: a descriptor would
    outlive a device that is gone. asleep: nothing is read; most files would wake the device."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asleep = folder, False
        self._absent: set[str] = set()

    def read(self, name: str) -> bytes | None:
        """The whole file. None while it cannot be read (EIO, EBUSY, EPERM during a reset), and for good where it does not
        exist."""
        if self.asleep or name in self._absent:
            return None
        try:
            with (self.folder / name).open("rb", buffering=0) as file:
                return b"".join(iter(lambda: file.read(4096), b""))  # a list comes in pieces of a page
        except FileNotFoundError:
            self._absent.add(name)
        except OSError:
            pass
        return None

    def text(self, name: str) -> str:
        return (self.read(name) or b"").decode("utf-8", "replace").strip()

    def number(self, name: str) -> float | None:
        text = self.text(name)
        return float(text) if text.isdecimal() else None

    def names(self, pattern: str) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob(pattern))


class KernelGpu:
    """The counterpart of device.Gpu: its methods return and raise the same. Intel's drivers tell through perf events only, which
    need rights, how busy the device is: the utilization is that of this process (drm_clients.py).

    index: on this node, by PCI address; folder: of its PCI device; card: its name in /sys/class/drm; process: our folder
    in /proc. is_divided: several ranks may compute on it, and its figures are no single rank's. is_integrated: part of
    the processor, and of interest only where a rank computes on it.
    """

    def __init__(
        self,
        index: int,
        folder: Path,
        card: str,
        *,
        process: Path = _PROCESS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index, self.pci, self._clock = index, folder.name.lower(), clock
        self.files = files = Files(folder)
        found = dict(line.partition("=")[::2] for line in files.text("uevent").splitlines())
        self.driver = found.get("DRIVER", "")
        vendor = _VENDORS.get(self.driver, "")
        self.uuid = self.board = files.text("unique_id").lower() or self.pci
        self.name = files.text("product_name") or f"{vendor} GPU {found.get('PCI_ID', '')}".strip()
        self.processes = DrmClients(self.pci, process, is_utilization=vendor == "Intel")
        # in partitions of AMD's (DPX, CPX ...) each is a device for torch, and the files speak of the whole board
        self.is_divided = files.text("current_compute_partition") not in ("", "SPX")
        self.is_integrated = self.pci == "0000:00:02.0"
        self.free_bytes: float | None = None
        names = files.names("hwmon/hwmon*/name")
        hwmon = next((name.removesuffix("name") for name in names if files.text(name) == self.driver), "none/")
        self._place = {"hwmon": hwmon, "card": f"drm/{card}/"}
        labels = files.names(hwmon + "temp*_label")
        inputs = {files.text(name): name.replace("_label", "_input") for name in labels}
        sensors = {name: inputs[label] for label, name in reversed(_TEMPERATURES.items()) if label in inputs}
        # without labels (i915, amdgpu before Linux 5.3) there is one sensor, of the whole chip
        sensors = sensors or {"temperature_c": f"{hwmon}temp1_input"}
        self._temperatures = [(name, file, 1e-3) for name, file in sensors.items()]
        self._sizes = files.names("tile*/physical_vram_size_bytes")
        counters = files.names(hwmon + "energy[12]_input")
        self._counter = next(filter(files.number, counters), None)
        self._energy_j: float | None = None
        self._rates, self._read_at = Rates(), clock()
        errors = [*files.names("ras/*_err_count"), *files.names("ras/aca_*")]
        # the newest of each that can be read at all: a sum without one of them would fall, and rise again
        self._errors = {name: text for name in errors if (text := files.text(name))}

    def readings(self) -> dict[str, float]:
        self.files.asleep = False
        self.files.asleep = self.files.text("power/runtime_status") == "suspended"
        values = self._numbers(_OFTEN)
        sizes = [self.files.number(file) for file in self._sizes]
        if sizes and None not in sizes:
            values["memory_total_bytes"] = sum(size or 0.0 for size in sizes)
        self._add_energy(values)
        if not values and not self.files.folder.exists():
            raise DeviceLost("its files in /sys are gone")
        used, total = values.get("memory_used_bytes"), values.get("memory_total_bytes")
        self.free_bytes = None if used is None or total is None else total - used
        return values

    def _add_energy(self, values: dict[str, float]) -> None:
        """By Intel's counter, which gives the power as well; of amdgpu, whose counter is in a binary table, as the sum of the
        power."""
        before, self._read_at = self._read_at, self._clock()
        if self._counter is not None:
            count = self.files.number(self._counter)  # microjoules
            self._energy_j = count * 1e-6 if count else None
            if count:
                self._rates.add(values, "power_w", count, self._read_at, 1e-6)
        elif "power_w" in values:
            self._energy_j = (self._energy_j or 0.0) + values["power_w"] * (self._read_at - before)

    def second(self, _now: float) -> dict[str, float]:
        return self._numbers(self._temperatures)

    def rare(self) -> dict[str, float]:
        values = self._numbers(_RARELY)
        self._errors |= {name: text for name in self._errors if (text := self.files.text(name))}
        counts = "\n".join(self._errors.values())
        for name, kind in (("ecc_uncorrected_volatile", "ue"), ("ecc_corrected_volatile", "ce")):
            found = re.findall(rf"^{kind}: *(\d+)", counts, re.MULTILINE)
            if found:
                values[name] = float(sum(map(int, found)))
        pages = self.files.read("ras/gpu_vram_bad_pages")
        if pages is not None:
            values["retired_pages_double"] = float(sum(page.endswith(b": R") for page in pages.splitlines()))
        return values

    def energy_j(self) -> float | None:
        """As of the last reading, since some moment; None where it is not known."""
        return self._energy_j

    def describe(self) -> dict[str, object]:
        values = self.readings() | self.rare()
        found: dict[str, object] = {"index": self.index, "uuid": self.uuid, "name": self.name, "pci": self.pci}
        return found | {name: values[name] for name in ("memory_total_bytes", "power_limit_w") if name in values}

    def _numbers(self, rows: Iterable[Row]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, file, factor in rows:
            number = None if name in values else self.files.number(file.format_map(self._place))
            if number or (number is not None and name in _MAY_BE_ZERO):
                values[name] = number * factor
        return values


def boards(sys: Path = Path("/sys"), **options: Any) -> list[KernelGpu]:
    """The AMD and Intel GPUs of this node, in the order of their PCI addresses; display adapters (ast, mgag200, virtio) are
    none. sys, and options of `KernelGpu`: a test passes its own."""
    found: dict[str, tuple[Path, str]] = {}
    for card in sorted((sys / "class/drm").glob("card*")):
        try:
            folder = (card / "device").resolve(strict=True)
            lines = (folder / "uevent").read_text(encoding="ascii", errors="replace").splitlines()
        except OSError:  # it is being removed
            continue
        is_known = any(line.removeprefix("DRIVER=") in _VENDORS for line in lines)
        if is_known and card.name.removeprefix("card").isdigit():  # else a connector of a card
            found[folder.name] = folder, card.name
    return [KernelGpu(index, *found[pci], **options) for index, pci in enumerate(sorted(found))]


def driver_of(gpus: Sequence[KernelGpu]) -> str:
    return f"{', '.join(sorted({gpu.driver for gpu in gpus}))} of Linux {os.uname().release}"
