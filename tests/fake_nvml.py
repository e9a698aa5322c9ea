"""A library that stands where pynvml stands: the real structures, constants and errors, devices of our own making.

Functions have the signatures of the real ones; a test compares them. Everything that the library does not define here
is pynvml's own, so that a name that does not exist there does not exist here either.
"""

# ruff: noqa: N802, N803, N815 - the library's own names
from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pynvml

__all__ = ["FakeGpu", "FakeNvml", "FakeSlice", "Running", "functions"]


@dataclass
class Running:
    """A process on a GPU. memory: bytes, or None as on Windows; sm: percent."""

    pid: int
    memory: int | None = 0
    sm: int = 0


@dataclass(eq=False)
class FakeGpu:
    """One board. Values are in NVML's own units (mW, mJ, KiB). memory: used by processes, and all there is; reserved:
    what the driver keeps for itself, which the first version of the question counts as used. unsupported: functions
    that this device refuses; lost: every call fails as if the device had fallen off the bus; hanging: every call waits
    for `release`."""

    uuid: str = "GPU-11111111-2222-3333-4444-555555555555"
    name: str = "NVIDIA H200"
    pci: str = "00000000:3B:00.0"
    utilization: tuple[int, int] = (50, 20)
    memory: tuple[int, int] = (8 << 30, 140 << 30)
    reserved: int = 0
    power_mw: int = 400_000
    energy_mj: int = 1_000_000
    temperature: int = 55
    clocks: dict[int, int] = field(default_factory=lambda: {pynvml.NVML_CLOCK_SM: 1980, pynvml.NVML_CLOCK_MEM: 3201})
    reasons: int = 0
    fan: int = 30
    pcie: tuple[int, int] = (5, 16)
    pcie_kib: tuple[int, int] = (1000, 2000)
    fields: dict[int, int] = field(default_factory=dict)
    gpm: dict[int, float] | None = None
    processes: list[Running] = field(default_factory=list)
    slices: list[Any] = field(default_factory=list)
    unsupported: set[str] = field(default_factory=set)
    lost: bool = False
    hanging: bool = False
    release: threading.Event = field(default_factory=threading.Event)
    entered: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class FakeSlice:
    """A MIG slice of a board."""

    uuid: str
    instance: int
    memory: tuple[int, int] = (1 << 30, 18 << 30)
    reserved: int = 0
    gpm: dict[int, float] | None = None
    processes: list[Running] = field(default_factory=list)


class FakeNvml:
    """`FakeNvml(FakeGpu(), FakeGpu(uuid=...))`. calls: how often each function was called; events: Xid errors to
    come."""

    def __init__(self, *gpus: FakeGpu) -> None:
        self.gpus = list(gpus)
        self.calls: Counter[str] = Counter()
        self.events: deque[tuple[FakeGpu, int]] = deque()
        self.registered: list[FakeGpu] = []
        self.clock = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(pynvml, name)  # a name that pynvml does not have is no name here
        if name.startswith("nvml") and callable(value):
            raise AttributeError(name)
        return value

    def load(self) -> tuple[Any, str]:
        """As the sampler starts the library."""
        return self, ""

    def _of(self, name: str, handle: Any) -> Any:
        self.calls[name] += 1
        board = handle if isinstance(handle, FakeGpu) else next(gpu for gpu in self.gpus if handle in gpu.slices)
        if board.hanging:
            board.entered.set()
            board.release.wait(60)
        if board.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        if name in board.unsupported:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return handle

    def _board(self, name: str, handle: Any) -> FakeGpu:
        """A question that only a whole board answers."""
        if isinstance(handle, FakeSlice):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._of(name, handle)
        return handle  # type: ignore[no-any-return]

    # ---- the library's functions, in pynvml's order and with its parameters

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:
        self._of("nvmlDeviceGetHandleByIndex", self.gpus[index])
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return str(self._of("nvmlDeviceGetName", handle).name)

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return str(self._of("nvmlDeviceGetUUID", handle).uuid)

    def nvmlDeviceGetPciInfo(self, handle: Any) -> Any:
        info = pynvml.nvmlPciInfo_t()
        info.busId = self._board("nvmlDeviceGetPciInfo", handle).pci.encode()
        return info

    def nvmlDeviceGetUtilizationRates(self, handle: Any) -> Any:
        rates = pynvml.c_nvmlUtilization_t()
        rates.gpu, rates.memory = self._board("nvmlDeviceGetUtilizationRates", handle).utilization
        return rates

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:
        found = self._of("nvmlDeviceGetMemoryInfo", handle)
        if version is not None:
            assert version == pynvml.nvmlMemory_v2
            self._of("nvmlDeviceGetMemoryInfo_v2", handle)
        memory = pynvml.c_nvmlMemory_t() if version is None else pynvml.c_nvmlMemory_v2_t()
        memory.used, memory.total = found.memory
        memory.free = memory.total - memory.used - found.reserved
        if version is None:
            memory.used += found.reserved
        else:
            memory.reserved = found.reserved
        return memory

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetPowerUsage", handle).power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any) -> int:
        self._board("nvmlDeviceGetEnforcedPowerLimit", handle)
        return 700_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetTotalEnergyConsumption", handle).energy_mj

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._board("nvmlDeviceGetTemperature", handle).temperature

    def nvmlDeviceGetClockInfo(self, handle: Any, type: int) -> int:  # noqa: A002
        return self._board("nvmlDeviceGetClockInfo", handle).clocks[type]

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetCurrentClocksEventReasons", handle).reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetCurrentClocksThrottleReasons", handle).reasons

    def nvmlDeviceGetFanSpeed(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetFanSpeed", handle).fan

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetCurrPcieLinkGeneration", handle).pcie[0]

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any) -> int:
        return self._board("nvmlDeviceGetCurrPcieLinkWidth", handle).pcie[1]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any) -> int:
        self._board("nvmlDeviceGetMaxPcieLinkGeneration", handle)
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any) -> int:
        self._board("nvmlDeviceGetMaxPcieLinkWidth", handle)
        return 16

    def nvmlDeviceGetPcieThroughput(self, device: Any, counter: int) -> int:
        return self._board("nvmlDeviceGetPcieThroughput", device).pcie_kib[counter]

    def nvmlDeviceGetFieldValues(self, handle: Any, fieldIds: list[Any]) -> Any:
        known = self._board("nvmlDeviceGetFieldValues", handle).fields
        values = (pynvml.c_nvmlFieldValue_t * len(fieldIds))()
        for value, (number, scope) in zip(values, fieldIds, strict=True):
            value.fieldId, value.scopeId = number, scope
            if number in known:
                value.nvmlReturn, value.valueType = pynvml.NVML_SUCCESS, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
                value.value.ullVal = known[number]
            else:
                value.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return values

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Any]:
        found = self._of("nvmlDeviceGetComputeRunningProcesses", handle)
        listed = []
        for running in found.processes:
            process = pynvml.c_nvmlProcessInfo_v3_t()
            process.pid = running.pid
            friendly = pynvml.nvmlStructToFriendlyObject(process)
            friendly.usedGpuMemory = running.memory
            listed.append(friendly)
        return listed

    def nvmlDeviceGetProcessUtilization(self, handle: Any, timeStamp: int) -> list[Any]:
        found = self._board("nvmlDeviceGetProcessUtilization", handle)
        if not found.processes:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        self.clock += 1_000_000
        samples = []
        for running in found.processes:
            sample = pynvml.c_nvmlProcessUtilizationSample_t()
            sample.pid, sample.timeStamp, sample.smUtil = running.pid, self.clock, running.sm
            samples.append(sample)
        return samples

    def nvmlDeviceGetMigMode(self, device: Any) -> list[int]:
        mode = int(bool(self._board("nvmlDeviceGetMigMode", device).slices))
        return [mode, mode]

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Any) -> int:
        self._board("nvmlDeviceGetMaxMigDeviceCount", device)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Any, index: int) -> FakeSlice:
        slices = self._board("nvmlDeviceGetMigDeviceHandleByIndex", device).slices
        if index >= len(slices):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return slices[index]

    def nvmlDeviceGetGpuInstanceId(self, device: Any) -> int:
        return int(device.instance)

    def nvmlGpmQueryDeviceSupport(self, device: Any) -> Any:
        found = self._board("nvmlGpmQueryDeviceSupport", device)
        support = pynvml.c_nvmlGpmSupport_t()
        support.isSupportedDevice = int(found.gpm is not None or any(part.gpm is not None for part in found.slices))
        return support

    def nvmlGpmSampleAlloc(self) -> Any:
        return pynvml.c_nvmlGpmSample_t()

    def nvmlGpmSampleGet(self, device: Any, gpmSample: Any) -> Any:
        self._gpm = self._board("nvmlGpmSampleGet", device).gpm
        return gpmSample

    def nvmlGpmMigSampleGet(self, device: Any, gpuInstanceId: Any, gpmSample: Any) -> Any:
        board = self._board("nvmlGpmMigSampleGet", device)
        self._gpm = next(part.gpm for part in board.slices if part.instance == gpuInstanceId.value)
        return gpmSample

    def nvmlGpmMetricsGet(self, metricsGet: Any) -> Any:
        assert metricsGet.version == pynvml.NVML_GPM_METRICS_GET_VERSION
        for place in range(metricsGet.numMetrics):
            metric = metricsGet.metrics[place]
            known = self._gpm or {}
            metric.nvmlReturn = pynvml.NVML_SUCCESS if metric.metricId in known else pynvml.NVML_ERROR_NOT_SUPPORTED
            metric.value = known.get(metric.metricId, 0.0)
        return metricsGet

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any) -> int:
        self._of("nvmlDeviceGetSupportedEventTypes", handle)
        return int(pynvml.nvmlEventTypeXidCriticalError | pynvml.nvmlEventTypePState)

    def nvmlDeviceRegisterEvents(self, handle: Any, eventTypes: int, eventSet: Any) -> None:
        self._of("nvmlDeviceRegisterEvents", handle)
        assert eventTypes == pynvml.nvmlEventTypeXidCriticalError
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, eventSet: Any, timeoutms: int) -> Any:
        assert timeoutms == 0, "polling must not wait"
        if not self.events:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_TIMEOUT)
        device, code = self.events.popleft()

        class Data:  # c_nvmlEventData_t holds a pointer to the device, which a fake has none of
            eventType, eventData = pynvml.nvmlEventTypeXidCriticalError, code

        Data.device = device  # type: ignore[attr-defined]
        return Data


def functions() -> dict[str, Callable[..., Any]]:
    """The library's functions that the fake has."""
    return {name: value for name, value in vars(FakeNvml).items() if name.startswith("nvml")}
