"""The one door to NVML. Everything behind it is plain code with None for what a device does not tell.

A driver may hang instead of failing (a GPU that fell off the bus), so NVML is started in a thread of its own with two seconds
to answer, and read on the courier's thread, which the sender replaces when it does not come back. Readings are rare and cheap
(utilization 2.5 µs, memory 12 µs, read elsewhere); process lists are never asked for (milliseconds under the driver's lock).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Device", "FakeDevice", "NvmlDevice", "devices", "visible"]

PROBE_S = 2.0


class Device(Protocol):
    """One GPU. index: as NVML counts; uuid: "GPU-..."."""

    index: int
    uuid: str

    def utilization_pct(self) -> float | None: ...

    def read(self) -> dict[str, float]:
        """memory_used_bytes, memory_total_bytes, power_w, temperature_c, sm_clock_mhz, as far as the device tells."""


class FakeDevice:
    """A device for tests: says what it was given; an exception among the values is raised."""

    def __init__(self, index: int = 0, utilization: Sequence[float | Exception | None] = (), **values: float) -> None:
        self.index, self.uuid = index, f"GPU-{index:08d}"
        self._utilization = list(utilization)
        self.values: dict[str, float] = dict(values)

    def utilization_pct(self) -> float | None:
        value = self._utilization.pop(0) if len(self._utilization) > 1 else (self._utilization or [None])[0]
        if isinstance(value, Exception):
            raise value
        return value

    def read(self) -> dict[str, float]:
        return dict(self.values)


class NvmlDevice:
    """One GPU as NVML sees it. A reading that the device does not support is not asked for again."""

    def __init__(self, nvml: Any, index: int, handle: Any) -> None:
        self._nvml, self._handle, self.index = nvml, handle, index
        uuid = nvml.nvmlDeviceGetUUID(handle)
        self.uuid = uuid.decode() if isinstance(uuid, bytes) else str(uuid)
        self._unsupported: set[str] = set()

    def utilization_pct(self) -> float | None:
        rates = self._ask("utilization", self._nvml.nvmlDeviceGetUtilizationRates, self._handle)
        return None if rates is None else float(rates.gpu)

    def read(self) -> dict[str, float]:
        values: dict[str, float] = {}
        nvml = self._nvml
        memory = self._ask("memory", nvml.nvmlDeviceGetMemoryInfo, self._handle)
        if memory is not None:
            values["memory_used_bytes"], values["memory_total_bytes"] = float(memory.used), float(memory.total)
        power = self._ask("power", nvml.nvmlDeviceGetPowerUsage, self._handle)
        if power is not None:
            values["power_w"] = power / 1000.0
        temperature = self._ask("temperature", nvml.nvmlDeviceGetTemperature, self._handle, nvml.NVML_TEMPERATURE_GPU)
        if temperature is not None:
            values["temperature_c"] = float(temperature)
        clock = self._ask("clock", nvml.nvmlDeviceGetClockInfo, self._handle, nvml.NVML_CLOCK_SM)
        if clock is not None:
            values["sm_clock_mhz"] = float(clock)
        return values

    def _ask(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """The guarded door: None when this device does not tell; an error of the device itself goes on to the caller."""
        if what in self._unsupported:
            return None
        try:
            return function(*arguments)
        except self._nvml.NVMLError_NotSupported:
            self._unsupported.add(what)
        except self._nvml.NVMLError_Unknown:
            return None
        return None


def devices(timeout_s: float = PROBE_S) -> list[Device]:
    """All GPUs of this node; empty without a driver, or when NVML does not answer in time (its thread is left behind)."""
    found: list[list[Device]] = []
    probe = threading.Thread(target=lambda: found.append(_probe()), name="perfagent-nvml-probe", daemon=True)
    try:
        probe.start()
    except RuntimeError:
        return []
    probe.join(timeout_s)
    return found[0] if found else []


def _probe() -> list[Device]:
    result: list[Device] = []
    with contextlib.suppress(Exception):  # no library, no driver, no permission: then there is no GPU to speak of
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):
                result.append(NvmlDevice(pynvml, index, pynvml.nvmlDeviceGetHandleByIndex(index)))
    return result


def visible(found: Sequence[Device], environ: Mapping[str, str]) -> list[Device]:
    """The devices in the order in which CUDA counts them in this process, as CUDA_VISIBLE_DEVICES tells.

    CUDA sorts by speed unless CUDA_DEVICE_ORDER=PCI_BUS_ID; the GPUs of a training node are alike, so that order is NVML's.
    """
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return list(found)
    result: list[Device] = []
    for word in (part.strip() for part in chosen.split(",")):
        match = [d for d in found if word and (str(d.index) == word or (word.startswith("GPU-") and d.uuid.startswith(word)))]
        if not match:  # CUDA ignores everything from the first entry that names no device
            break
        result.append(match[0])
    return result
