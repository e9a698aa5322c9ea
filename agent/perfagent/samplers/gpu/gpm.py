"""GPU performance monitoring (GPM): how much of the chip really works. Hopper and later, without DCGM and without root.

Two samples of the hardware's counters give exact means over the time between them, so that one call a second loses
nothing. "Utilization" of NVML says only that some kernel ran; `sm_active_pct` says how many of the multiprocessors did.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from perfagent.samplers.gpu.nvml import Door

__all__ = ["Gpm"]

_MIB = 2**20
METRICS: dict[int, tuple[str, float]] = {  # NVML_GPM_METRIC_*: name here, factor to our unit
    2: ("sm_active_pct", 1.0),
    3: ("sm_occupancy_pct", 1.0),
    5: ("tensor_active_pct", 1.0),
    10: ("dram_active_pct", 1.0),
    20: ("pcie_sent_bytes_per_s", _MIB),
    21: ("pcie_received_bytes_per_s", _MIB),
    60: ("nvlink_received_bytes_per_s", _MIB),
    61: ("nvlink_sent_bytes_per_s", _MIB),
}


class Gpm:
    """instance: the GPU instance of a MIG slice; None for a whole GPU."""

    def __init__(self, door: Door, handle: Any, instance: float | None) -> None:
        self._door, self._handle, self._instance = door, handle, instance
        support = door.ask("nvmlGpmQueryDeviceSupport", handle)
        self.supported = support is not None and bool(support.isSupportedDevice)
        self._before: Any = None
        self._after: Any = None
        self._request: Any = None
        self._taken = 0.0

    def read(self, now: float) -> dict[str, float] | None:
        """Means since the last call, empty at the first; None when this device has no GPM (any more)."""
        if not self.supported:
            return None
        if self._request is None and not self._prepare():
            return None
        sample = self._take(self._after)
        if sample is None:
            return None if self._refused() else {}
        self._before, self._after = self._after, self._before
        first, self._taken = not self._taken, now
        if first:
            return {}
        request = self._request
        request.sample1, request.sample2 = self._after, self._before
        if self._door.ask("nvmlGpmMetricsGet", request) is None:
            return None if self._refused() else {}
        values: dict[str, float] = {}
        for place in range(len(METRICS)):
            metric = request.metrics[place]
            name, factor = METRICS[metric.metricId]
            if metric.nvmlReturn == 0 and math.isfinite(metric.value):
                values[name] = metric.value * factor
        return values

    def _prepare(self) -> bool:
        """The two samples and the request, made once: 20 kB that pynvml's structure takes."""
        library = self._door.nvml
        self._before, self._after = self._door.ask("nvmlGpmSampleAlloc"), self._door.ask("nvmlGpmSampleAlloc")
        if self._before is None or self._after is None:
            return False
        request = library.c_nvmlGpmMetricsGet_t()
        request.version, request.numMetrics = library.NVML_GPM_METRICS_GET_VERSION, len(METRICS)
        for place, number in enumerate(METRICS):
            request.metrics[place].metricId = number
        self._request = request
        return True

    def _take(self, sample: Any) -> Any:
        if self._instance is None:
            return self._door.ask("nvmlGpmSampleGet", self._handle, sample)
        return self._door.ask("nvmlGpmMigSampleGet", self._handle, ctypes.c_uint(int(self._instance)), sample)

    def _refused(self) -> bool:
        asked = ("nvmlGpmSampleGet" if self._instance is None else "nvmlGpmMigSampleGet", "nvmlGpmMetricsGet")
        return any(self._door.refuses(name) for name in asked)
