"""GPU performance monitoring (GPM): how much of the chip really works. Hopper and later, without DCGM and without root.

Two samples of the hardware's counters give exact means over the time between them.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

from perfagent.samplers.gpu.nvml import Door

__all__ = ["Gpm"]

_MIB = 2**20
METRICS: dict[int, tuple[str, float]] = {
    2: ("sm_active_pct", 1.0), 3: ("sm_occupancy_pct", 1.0), 5: ("tensor_active_pct", 1.0), 10: ("dram_active_pct", 1.0),
    20: ("pcie_sent_bytes_per_s", _MIB), 21: ("pcie_received_bytes_per_s", _MIB),
    60: ("nvlink_received_bytes_per_s", _MIB), 61: ("nvlink_sent_bytes_per_s", _MIB),
}  # fmt: skip
"""NVML_GPM_METRIC_*: name here, factor to our unit."""


class Gpm:
    """instance: the GPU instance of a MIG slice; None for a whole GPU."""

    def __init__(self, door: Door, handle: object, instance: int | None) -> None:
        self._door = door
        whole = instance is None
        self._sample = (
            ("nvmlGpmSampleGet", handle) if whole else ("nvmlGpmMigSampleGet", handle, ctypes.c_uint(instance or 0))
        )
        support = door.ask("nvmlGpmQueryDeviceSupport", handle)
        self.supported = support is not None and bool(support.isSupportedDevice)
        self._before: object = None
        self._after: object = None
        self._request: Any = None
        self._is_first = True

    def read(self) -> dict[str, float] | None:
        """Means since the last call, empty at the first; None when this device has no GPM (any more)."""
        if not self.supported or (self._request is None and not self._prepare()):
            return None
        if self._door.ask(*self._sample, self._after) is None:
            return None if self._door.refuses(self._sample[0]) else {}
        self._before, self._after = self._after, self._before
        if self._is_first:
            self._is_first = False
            return {}
        request = self._request
        request.sample1, request.sample2 = self._after, self._before
        if self._door.ask("nvmlGpmMetricsGet", request) is None:
            return None if self._door.refuses("nvmlGpmMetricsGet") else {}
        values: dict[str, float] = {}
        for metric in request.metrics[: len(METRICS)]:
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
