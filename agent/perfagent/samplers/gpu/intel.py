"""Intel GPUs, by the files of the drivers i915 and xe.

Their meaning and units: Documentation/ABI/testing/sysfs-driver-intel-i915-hwmon and -xe-hwmon of the kernel, and the
comments in drivers/gpu/drm/xe/xe_gt_freq.c and xe_gt_throttle.c. How busy the device is they tell through perf events
only, which need rights: the utilization is that of this process (drm_clients.py). Left out: the PCIe link, of which the
function shows the bridge inside the board.
"""

from __future__ import annotations

from typing import Any

from perfagent.samplers.gpu.kernel_gpu import KernelGpu

__all__ = ["IntelGpu"]

_THROTTLES = {
    "sw_power_cap": ("pl1", "pl2", "pl4", "vr_tdc", "iccmax", "psys_pl1", "psys_pl2"),
    "hw_thermal": (
        "thermal", "prochot", "ratl", "vr_thermalert", "soc_thermal", "soc_avg_thermal", "mem_thermal", "vr_thermal",
    ),
}  # fmt: skip


class IntelGpu(KernelGpu):
    """Clock and throttling are those of the first tile. Power and its limit are the card's or, where it has none, the
    package's."""

    vendor = "Intel"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.is_integrated = self.pci == "0000:00:02.0"
        folder = "tile0/gt0/freq0/" if self.driver == "xe" else f"{self._card}gt/gt0/"
        clocks = (f"{folder}act_freq", f"{folder}rps_act_freq_mhz", f"{self._card}gt_act_freq_mhz")
        self._often = [("sm_clock_mhz", file, 1.0) for file in clocks]
        self._rarely = [("power_limit_w", f"{self._hwmon}power{channel}_max", 1e-6) for channel in (1, 2)]
        reasons = folder + ("throttle/" if self.driver == "xe" else "throttle_")
        self._status = reasons + ("status" if self.driver == "xe" else "reason_status")
        self._reasons = {
            group: [file for name in names for file in self.files.names(f"{reasons}reason_{name}")]
            for group, names in _THROTTLES.items()
        }
        counters = [f"{self._hwmon}energy{channel}_input" for channel in (1, 2)]
        self._counter = next(filter(self.files.number, counters), counters[0])
        self._tiles = self.files.names("tile*/physical_vram_size_bytes")
        self._mark: tuple[float, float] | None = None

    def _read(self) -> dict[str, float]:
        values = super()._read()
        self._read_energy(values)
        self._read_memory(values)
        status = self.files.number(self._status)
        for group, files in self._reasons.items():
            if status is not None and files:
                values[f"throttle_{group}_pct"] = 100.0 if status and any(map(self.files.number, files)) else 0.0
        return values

    def _read_energy(self, values: dict[str, float]) -> None:
        """In microjoules; its growth is the power."""
        count = self.files.number(self._counter)
        energy = self._energy_j = count * 1e-6 if count else None
        before, now = self._mark, self._clock()
        self._mark = None if energy is None else (now, energy)
        if energy is not None and before is not None and now > before[0] and energy >= before[1]:
            values["power_w"] = (energy - before[1]) / (now - before[0])

    def _read_memory(self, values: dict[str, float]) -> None:
        """xe tells the size of each tile's memory; Intel's own build of i915 also what is free of it."""
        sizes = [self.files.number(file) for file in self._tiles or [f"{self._card}lmem_total_bytes"]]
        free = self.files.number(f"{self._card}lmem_avail_bytes")
        total = sum(size or 0.0 for size in sizes)
        if total and None not in sizes:
            values["memory_total_bytes"] = total
            if free is not None:
                values["memory_used_bytes"] = total - free
