"""One GPU, or one MIG slice of it: its figures at each reading, each second and each ten seconds.

A MIG slice reports its memory and its GPM figures. Power, its limit, energy and utilization belong to the whole board and would
be counted once per slice, so that a slice leaves them out; each reports temperature, clocks and errors of the board.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from perfagent.samplers.gpu.gpm import Gpm
from perfagent.samplers.gpu.nvml import Door, Library
from perfagent.samplers.gpu.processes import Processes
from perfagent.samplers.rates import Rates

__all__ = ["FIELDS", "THROTTLE_REASONS", "Gpu", "slices", "text_of"]

THROTTLE_REASONS = {
    "sw_power_cap": 0x4, "hw_slowdown": 0x8, "sync_boost": 0x10, "sw_thermal": 0x20, "hw_thermal": 0x40, "power_brake": 0x80,
}  # fmt: skip
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that hold clocks back (idle and set application clocks do not
count)."""

_KIB = 1024
FIELDS = {
    "ecc_corrected_volatile": "ECC_SBE_VOL_TOTAL", "ecc_uncorrected_volatile": "ECC_DBE_VOL_TOTAL",
    "ecc_corrected_aggregate": "ECC_SBE_AGG_TOTAL", "ecc_uncorrected_aggregate": "ECC_DBE_AGG_TOTAL",
    "retired_pages_single": "RETIRED_SBE", "retired_pages_double": "RETIRED_DBE", "pcie_replays": "PCIE_REPLAY_COUNTER",
    "nvlink_crc_flit_errors": "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "nvlink_replay_errors": "NVLINK_REPLAY_ERROR_COUNT_TOTAL",
    "nvlink_crc_data_errors": "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "memory_temperature_c": "MEMORY_TEMP",
    "nvlink_recovery_errors": "NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "remapped_rows_corrected": "REMAPPED_COR",
    "remapped_rows_uncorrected": "REMAPPED_UNC", "remap_pending": "REMAPPED_PENDING", "remap_failed": "REMAPPED_FAILURE",
}  # fmt: skip
"""Names of values -> names of fields in nvml.h, without NVML_FI_DEV_."""
_LINK_FIELDS = {
    "nvlink_sent_bytes_per_s": "NVLINK_THROUGHPUT_DATA_TX", "nvlink_received_bytes_per_s": "NVLINK_THROUGHPUT_DATA_RX",
}  # fmt: skip
_ALL_LINKS = 2**32 - 1
"""The scope of those."""
_VALUE = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Member of nvmlValue_t by nvmlValueType_t."""
_ZERO_SAYS_NOTHING = frozenset(("memory_temperature_c",))


class _Number(NamedTuple):
    """A value that one function of the library gives. of_board: it belongs to the whole board, and no slice has it."""

    name: str
    function: str
    factor: float = 1.0
    argument: int | None = None
    of_board: bool = False


_OFTEN = (
    _Number("power_w", "nvmlDeviceGetPowerUsage", 1e-3, of_board=True),
    _Number("sm_clock_mhz", "nvmlDeviceGetClockInfo", argument=1),
)
_EACH_SECOND = (_Number("temperature_c", "nvmlDeviceGetTemperature", argument=0),)
_RARELY = (
    _Number("fan_pct", "nvmlDeviceGetFanSpeed"),
    _Number("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", 1e-3, of_board=True),
    _Number("pcie_link_width", "nvmlDeviceGetCurrPcieLinkWidth"),
    _Number("pcie_link_generation", "nvmlDeviceGetCurrPcieLinkGeneration"),
    _Number("memory_clock_mhz", "nvmlDeviceGetClockInfo", argument=2),
)
_TRAFFIC = (  # each of the two measures for 20 ms
    _Number("pcie_sent_bytes_per_s", "nvmlDeviceGetPcieThroughput", _KIB, 0, of_board=True),
    _Number("pcie_received_bytes_per_s", "nvmlDeviceGetPcieThroughput", _KIB, 1, of_board=True),
)
_ENERGY = (_Number("energy_j", "nvmlDeviceGetTotalEnergyConsumption", 1e-3, of_board=True),)
_LIMITS = (
    _Number("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit", 1e-3),
    _Number("pcie_link_width_most", "nvmlDeviceGetMaxPcieLinkWidth"),
    _Number("pcie_link_generation_most", "nvmlDeviceGetMaxPcieLinkGeneration"),
)


class Gpu:
    """index: as NVML counts boards; uuid: "GPU-..." or "MIG-..."; board: the uuid of the whole GPU."""

    is_divided = is_integrated = False  # see KernelGpu; of a divided board of NVIDIA the slices are found

    def __init__(self, library: Library, index: int, handle: object, *, slice_handle: object = None) -> None:
        self._door = Door(library)
        self.index, self.handle, self._slice = index, handle, slice_handle
        self.board = text_of(self._door.ask("nvmlDeviceGetUUID", handle)) or f"GPU-{index}"
        self.uuid = self.board if slice_handle is None else text_of(self._door.ask("nvmlDeviceGetUUID", slice_handle))
        self.name = text_of(self._door.ask("nvmlDeviceGetName", handle))
        pci = self._door.ask("nvmlDeviceGetPciInfo", handle)
        self.pci = text_of(getattr(pci, "busId", "")).lower()
        instance = None if slice_handle is None else self._door.ask("nvmlDeviceGetGpuInstanceId", slice_handle)
        self.processes = Processes(self._door, handle if slice_handle is None else slice_handle)
        whole_or_numbered = slice_handle is None or instance is not None
        self._gpm: Gpm | None = Gpm(self._door, handle, instance) if whole_or_numbered else None
        self._fields, self._links = (
            {name: number for name, field in of.items() if (number := getattr(library, f"NVML_FI_DEV_{field}", None))}
            for of in (FIELDS, _LINK_FIELDS)
        )
        self._rates = Rates()
        self.free_bytes: float | None = None
        """Memory that nobody uses, as of the last reading."""
        version = getattr(library, "nvmlMemory_v2", None)
        self._versioned = (version,) if version is not None and self._memory(version) is not None else ()

    def readings(self) -> dict[str, float]:
        """Several times a second: what is worth a mean. Throttling is 0 or 100 at each reading."""
        values: dict[str, float] = {}
        memory = self._memory(*self._versioned)
        self.free_bytes = None if memory is None else float(memory.free)
        if memory is not None:
            values["memory_used_bytes"], values["memory_total_bytes"] = float(memory.used), float(memory.total)
        if self._slice is None:
            rates = self._door.ask("nvmlDeviceGetUtilizationRates", self.handle)
            if rates is not None:
                values["utilization_pct"], values["memory_busy_pct"] = float(rates.gpu), float(rates.memory)
        values |= self._numbers(_OFTEN)
        reasons = self._door.ask("nvmlDeviceGetCurrentClocksEventReasons", self.handle)
        if reasons is None:  # its name before driver 535
            reasons = self._door.ask("nvmlDeviceGetCurrentClocksThrottleReasons", self.handle)
        if reasons is not None:
            for name, bit in THROTTLE_REASONS.items():
                values[f"throttle_{name}_pct"] = 100.0 if reasons & bit else 0.0
        return values

    def second(self, now: float) -> dict[str, float]:
        """Once a second: temperature and GPM, which is itself a mean since the last call. now: monotonic seconds."""
        values = self._numbers(_EACH_SECOND)
        means = None if self._gpm is None else self._gpm.read()
        values.update(means or {})
        if means is None:
            self._gpm = None
            for name, count in self._ask_fields(self._links, _ALL_LINKS).items():
                self._rates.add(values, name, count, now, _KIB)
        return values

    def energy_j(self) -> float | None:
        """Energy since the driver was loaded, J; None on a slice and on devices before Volta."""
        return self._numbers(_ENERGY).get("energy_j")

    def rare(self) -> dict[str, float]:
        """Every ten seconds: fan, limits, links, and the counters of errors (since the driver was loaded, or ever:
        aggregate)."""
        values = self._numbers(_RARELY) | self._ask_fields(self._fields)
        return values if self._gpm is not None else values | self._numbers(_TRAFFIC)

    def describe(self) -> dict[str, object]:
        """What does not change while training runs; for people to read."""
        memory = self._memory(*self._versioned)
        found = {"index": self.index, "uuid": self.uuid, "name": self.name, "pci": self.pci, **self._numbers(_LIMITS)}
        found |= {"mig": self._slice is not None, "gpm": self._gpm is not None and self._gpm.supported}
        return found if memory is None else found | {"memory_total_bytes": int(memory.total)}

    def _memory(self, *version: int) -> Any:
        """total, free and used: in the second version what processes hold, as nvidia-smi has it. The first, of drivers before 510
        and WSL, counts the driver's own reserve as used (0.3 to 0.9 GB)."""
        handle = self._slice if self._slice is not None else self.handle
        return self._door.ask("nvmlDeviceGetMemoryInfo", handle, *version, what=f"memory {version}")

    def _ask_fields(self, fields: dict[str, int], scope: int = 0) -> dict[str, float]:
        """Several counters in one call; one that this device does not have is taken out of `fields`."""
        if not fields:
            return {}
        asked = [(number, scope) for number in fields.values()]
        answers = self._door.ask("nvmlDeviceGetFieldValues", self.handle, asked)
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

    def _numbers(self, rows: Sequence[_Number]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, function, factor, argument, of_board in rows:
            if not (of_board and self._slice is not None):
                arguments = () if argument is None else (argument,)
                value = self._door.ask(function, self.handle, *arguments, what=f"{function} {argument}")
                if value is not None:
                    values[name] = float(value) * factor
        return values


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


def text_of(value: object) -> str:
    """What pynvml gives as bytes or text, depending on its version."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value or "")
