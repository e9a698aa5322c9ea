"""One GPU, or one MIG slice of it: what it says at each reading, each second and each ten seconds.

Readings of a device are rare and cheap (utilization 2.5 µs, memory 12 µs as measured elsewhere; power and clocks wake
the device's controller and cost more). Counters that change once a day are read every ten seconds in one call. Process
lists take milliseconds under the driver's lock and are read every half minute (processes.py).

A MIG slice reports its memory and its GPM figures. Power, its limit, energy and utilization belong to the whole board
and would be counted once per slice, so that a slice leaves them out; temperature, clocks and errors of the board are
reported by each.
"""

from __future__ import annotations

import math
from typing import Any

from perfagent.samplers.gpu.gpm import Gpm
from perfagent.samplers.gpu.nvml import Door, Library
from perfagent.samplers.gpu.processes import Processes

__all__ = ["FIELDS", "LINK_FIELDS", "THROTTLE_REASONS", "Gpu", "slices", "text_of"]

THROTTLE_REASONS = {
    "sw_power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "power_brake": 0x80,
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that hold clocks back (idle and set application clocks do not
count)."""

_ALL_LINKS = 2**32 - 1
_KIB = 1024
FIELDS: dict[str, tuple[int, int]] = {  # name -> (field id, scope), NVML_FI_DEV_* in nvml.h
    "ecc_corrected_volatile": (3, 0),
    "ecc_uncorrected_volatile": (4, 0),
    "ecc_corrected_aggregate": (5, 0),
    "ecc_uncorrected_aggregate": (6, 0),
    "retired_pages_single": (29, 0),
    "retired_pages_double": (30, 0),
    "nvlink_crc_flit_errors": (38, 0),
    "nvlink_crc_data_errors": (45, 0),
    "nvlink_replay_errors": (52, 0),
    "nvlink_recovery_errors": (59, 0),
    "memory_temperature_c": (82, 0),
    "pcie_replays": (94, 0),
    "remapped_rows_corrected": (142, 0),
    "remapped_rows_uncorrected": (143, 0),
    "remap_pending": (144, 0),
    "remap_failed": (145, 0),
}
# KiB since the driver was loaded
LINK_FIELDS = {"nvlink_sent": (138, _ALL_LINKS), "nvlink_received": (139, _ALL_LINKS)}
_VALUE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of nvmlValue_t by nvmlValueType_t."""
_ZERO_SAYS_NOTHING = frozenset(("memory_temperature_c",))


class Gpu:
    """index: as NVML counts boards; uuid: "GPU-..." or "MIG-..."; board: the uuid of the whole GPU."""

    is_divided = is_integrated = False  # see KernelGpu; of a divided board of NVIDIA the slices are found

    def __init__(self, library: Library, index: int, handle: Any, *, slice_handle: Any = None) -> None:
        self._door = Door(library)
        self.index, self.handle, self._slice = index, handle, slice_handle
        self.board = text_of(self._door.ask("nvmlDeviceGetUUID", handle)) or f"GPU-{index}"
        self.uuid = self.board if slice_handle is None else text_of(self._door.ask("nvmlDeviceGetUUID", slice_handle))
        self.name = text_of(self._door.ask("nvmlDeviceGetName", handle))
        pci = self._door.ask("nvmlDeviceGetPciInfo", handle)
        self.pci = text_of(getattr(pci, "busId", "")).lower()
        self.instance = self._number("nvmlDeviceGetGpuInstanceId", slice_handle) if slice_handle is not None else None
        self.compute = (
            self._number("nvmlDeviceGetComputeInstanceId", slice_handle) if slice_handle is not None else None
        )
        self.processes = Processes(self._door, slice_handle if slice_handle is not None else handle)
        whole_or_numbered = slice_handle is None or self.instance is not None
        self._gpm: Gpm | None = Gpm(self._door, handle, self.instance) if whole_or_numbered else None
        self._fields = dict(FIELDS)
        self._links = dict(LINK_FIELDS)
        self._sent: tuple[float, dict[str, float]] | None = None
        self.free_bytes: float | None = None
        """Memory that nobody uses, as of the last reading."""
        version = getattr(library, "nvmlMemory_v2", None)
        self._versioned = (version,) if version is not None and self._memory(version) is not None else ()

    def readings(self) -> dict[str, float]:
        """Several times a second: what is worth a mean, a minimum and a maximum. Throttling is 0 or 100 at each
        reading."""
        values: dict[str, float] = {}
        memory = self._memory(*self._versioned)
        self.free_bytes = None if memory is None else float(memory.free)
        if memory is not None:
            values["memory_used_bytes"], values["memory_total_bytes"] = float(memory.used), float(memory.total)
        if self._slice is None:
            rates = self._door.ask("nvmlDeviceGetUtilizationRates", self.handle)
            if rates is not None:
                values["utilization_pct"], values["memory_busy_pct"] = float(rates.gpu), float(rates.memory)
            power = self._number("nvmlDeviceGetPowerUsage", self.handle)
            if power is not None:
                values["power_w"] = power / 1e3
        clock = self._number("nvmlDeviceGetClockInfo", self.handle, 1, what="SM clock")
        if clock is not None:
            values["sm_clock_mhz"] = clock
        reasons = self._door.ask("nvmlDeviceGetCurrentClocksEventReasons", self.handle)
        if reasons is None and self._door.refuses("nvmlDeviceGetCurrentClocksEventReasons"):
            # its name before driver 535
            reasons = self._door.ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.handle)
        if reasons is not None:
            for name, bit in THROTTLE_REASONS.items():
                values[f"throttle_{name}_pct"] = 100.0 if reasons & bit else 0.0
        return values

    def second(self, now: float) -> dict[str, float]:
        """Once a second: temperature and GPM, which is itself a mean since the last call. now: monotonic seconds."""
        values: dict[str, float] = {}
        temperature = self._number("nvmlDeviceGetTemperature", self.handle, 0, what="temperature")
        if temperature is not None:
            values["temperature_c"] = temperature
        if self._gpm is not None:
            told = self._gpm.read(now)
            if told is None:
                self._gpm = None
            else:
                values.update(told)
        if self._gpm is None and self._links:
            self._link_traffic(values, now)
        return values

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded, J; None on a slice and on devices before Volta."""
        if self._slice is not None:
            return None
        energy = self._number("nvmlDeviceGetTotalEnergyConsumption", self.handle)
        return None if energy is None else energy / 1e3

    def rare(self) -> dict[str, float]:
        """Every ten seconds: fan, limits, links, and the counters of errors (since the driver was loaded, or ever:
        aggregate)."""
        values: dict[str, float] = {}
        plain = (
            ("fan_pct", "nvmlDeviceGetFanSpeed", 1.0),
            *((("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", 1e-3),) if self._slice is None else ()),
            ("pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth", 1.0),
            ("pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration", 1.0),
        )
        for name, function, factor in plain:
            value = self._number(function, self.handle)
            if value is not None:
                values[name] = value * factor
        clock = self._number("nvmlDeviceGetClockInfo", self.handle, 2, what="memory clock")
        if clock is not None:
            values["memory_clock_mhz"] = clock
        values.update(self._ask_fields(self._fields))
        if self._gpm is None and self._slice is None:  # each of the two measures for 20 ms
            for name, counter in (("pcie_sent_bytes_per_s", 0), ("pcie_received_bytes_per_s", 1)):
                kib = self._number("nvmlDeviceGetPcieThroughput", self.handle, counter, what=name)
                if kib is not None:
                    values[name] = kib * _KIB
        return values

    def describe(self) -> dict[str, Any]:
        """What does not change while training runs; for people to read."""
        memory = self._memory(*self._versioned)
        told = {
            "index": self.index,
            "uuid": self.uuid,
            "name": self.name,
            "pci": self.pci,
            "memory_total_bytes": None if memory is None else int(memory.total),
            "power_limit_w": self._number("nvmlDeviceGetEnforcedPowerLimit", self.handle, factor=1e-3),
            "pcie_link_width_most": self._number("nvmlDeviceGetMaxPcieLinkWidth", self.handle),
            "pcie_link_generation_most": self._number("nvmlDeviceGetMaxPcieLinkGeneration", self.handle),
            "mig": self._slice is not None,
            "gpm": self._gpm is not None and self._gpm.supported,
        }
        return {key: value for key, value in told.items() if value is not None}

    def _memory(self, *version: int) -> Any:
        """total, free and used: in the second version what processes hold, as nvidia-smi tells it. The first, all that
        drivers before 510 have and WSL answers, counts the driver's own reserve as used (0.3 to 0.9 GB)."""
        handle = self._slice if self._slice is not None else self.handle
        return self._door.ask("nvmlDeviceGetMemoryInfo", handle, *version, what=f"memory {version}")

    def _link_traffic(self, values: dict[str, float], now: float) -> None:
        """Rates over NVLink from its counters; a counter that went back (a reset) leaves a gap."""
        counts = self._ask_fields(self._links)
        before, self._sent = self._sent, (now, counts)
        if before is None or now <= before[0]:
            return
        for name, count in counts.items():
            grown = count - before[1].get(name, math.inf)
            if grown >= 0:
                values[f"{name}_bytes_per_s"] = grown * _KIB / (now - before[0])

    def _ask_fields(self, fields: dict[str, tuple[int, int]]) -> dict[str, float]:
        """Several counters in one call; one that this device does not have is taken out of `fields`."""
        if not fields:
            return {}
        answers = self._door.ask("nvmlDeviceGetFieldValues", self.handle, list(fields.values()))
        if answers is None:
            if self._door.refuses("nvmlDeviceGetFieldValues"):
                fields.clear()
            return {}
        values: dict[str, float] = {}
        for name, answer in zip(list(fields), answers, strict=True):
            if answer.nvmlReturn == 0 and 0 <= answer.valueType < len(_VALUE):
                value = float(getattr(answer.value, _VALUE[answer.valueType]))
                if value or name not in _ZERO_SAYS_NOTHING:
                    values[name] = value
            elif answer.nvmlReturn in (2, 3, 4):
                del fields[name]
        return values

    def _number(self, name: str, *arguments: Any, factor: float = 1.0, what: str = "") -> float | None:
        value = self._door.ask(name, *arguments, what=what)
        return None if value is None else float(value) * factor


def slices(library: Library, gpu: Gpu) -> list[Gpu]:
    """The MIG slices of a board, in NVML's order; none when it is not divided."""
    door = Door(library)
    mode = door.ask("nvmlDeviceGetMigMode", gpu.handle)
    if not mode or not mode[0]:
        return []
    found = []
    for number in range(int(door.ask("nvmlDeviceGetMaxMigDeviceCount", gpu.handle) or 0)):
        handle = door.ask("nvmlDeviceGetMigDeviceHandleByIndex", gpu.handle, number, what=f"slice {number}")
        if handle is not None:
            found.append(Gpu(library, gpu.index, gpu.handle, slice_handle=handle))
    return found


def text_of(value: Any) -> str:
    """What pynvml gives as bytes or text, depending on its version."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
