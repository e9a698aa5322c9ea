"""AMD GPUs, by the files of the driver amdgpu.

Their meaning and units: Documentation/gpu/amdgpu of the kernel (thermal, driver-misc, RAS), that is the comments in
drivers/gpu/drm/amd/pm/amdgpu_pm.c and amdgpu_ras.c; the table `gpu_metrics`: include/kgd_pp_interface.h there. Left
out: `pcie_bw`, which takes a second, and the PCIe link, of which the function shows the switch inside the board.
"""

from __future__ import annotations

import re
import struct
from typing import Any

from perfagent.samplers.gpu.kernel_gpu import KernelGpu, Row

__all__ = ["AmdGpu"]

_OFTEN: tuple[Row, ...] = (
    ("utilization_pct", "gpu_busy_percent", 1.0),
    ("memory_busy_pct", "mem_busy_percent", 1.0),
    ("memory_used_bytes", "mem_info_vram_used", 1.0),
    ("memory_total_bytes", "mem_info_vram_total", 1.0),
    ("power_w", "{hwmon}power1_average", 1e-6),
    ("power_w", "{hwmon}power1_input", 1e-6),
    ("sm_clock_mhz", "{hwmon}freq1_input", 1e-6),
)
_RARELY: tuple[Row, ...] = (
    ("power_limit_w", "{hwmon}power1_cap", 1e-6),
    ("memory_clock_mhz", "{hwmon}freq2_input", 1e-6),
    ("fan_pct", "{hwmon}pwm1", 100 / 255),
    ("pcie_replays", "pcie_replay_count", 1.0),
)
_STATUS_AT, _BITS = 112, {"throttle_sw_power_cap_pct": 0xFFFFFF, "throttle_hw_thermal_pct": 0xFFFF << 32}
"""gpu_metrics 1.3 (MI100, MI200, Radeon): a bit a throttler, in amdgpu_smu.h 0 to 23 of power and current, 32 to 47 of
heat. Its energy has another unit on each chip."""
_ENERGY_AT = {4: 24, 5: 88, 6: 88, 7: 24, 8: 24}
"""gpu_metrics 1.4 to 1.8 (MI300): energy in units of 2**-16 J."""
_RESIDENCIES = struct.Struct("<6I")
"""From 1.6 on, 16 bytes behind the energy: cycles, and of them with PROCHOT, at the limit of power, of the heat of the
socket, of the regulators, of the memory."""


class AmdGpu(KernelGpu):
    vendor = "AMD"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # in partitions (DPX, CPX ...) each is a device for torch, and the files speak of the whole board
        self.is_divided = self.files.text("current_compute_partition") not in ("", "SPX")
        self._often, self._rarely = (
            [(name, file.format(hwmon=self._hwmon), factor) for name, file, factor in rows]
            for rows in (_OFTEN, _RARELY)
        )
        names = [*self.files.names("ras/*_err_count"), *self.files.names("ras/aca_*")]
        # the newest of each that can be read at all: a sum without one of them would fall, and rise again
        self._errors = {name: text for name in names if (text := self.files.text(name))}
        self._residencies: tuple[int, ...] | None = None

    def _read(self) -> dict[str, float]:
        self._energy_j = None
        return super()._read() | self._of_metrics(self.files.read("gpu_metrics") or b"")

    def rare(self) -> dict[str, float]:
        values = super().rare()
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

    def _of_metrics(self, table: bytes) -> dict[str, float]:
        """Throttling, and the energy; nothing for a table of another version."""
        size, form, content = struct.unpack_from("<HBB", table) if len(table) >= 4 else (0, 0, 0)
        if form != 1 or not 120 <= size <= len(table):
            return {}
        if content == 3:
            status = int.from_bytes(table[_STATUS_AT : _STATUS_AT + 8], "little")
            known = status != 2**64 - 1  # what the driver fills in where it does not know
            return {name: 100.0 if status & bits else 0.0 for name, bits in _BITS.items()} if known else {}
        at = _ENERGY_AT.get(content)
        if at is None:
            return {}
        energy = int.from_bytes(table[at : at + 8], "little")
        self._energy_j = None if energy == 2**64 - 1 else energy * 2.0**-16
        if content < 6 or size < at + 16 + _RESIDENCIES.size:
            return {}
        counts = _RESIDENCIES.unpack_from(table, at + 16)
        before, self._residencies = self._residencies, counts
        cycles = 0 if before is None else counts[0] - before[0]
        if before is None or cycles <= 0:
            return {}
        hot, power, *heat = (
            min(100.0, max(0.0, 100.0 * (now - then) / cycles))
            for now, then in zip(counts[1:], before[1:], strict=True)
        )
        return dict(zip(_BITS, (power, max(hot, *heat)), strict=True))
